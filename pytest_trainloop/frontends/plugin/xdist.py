"""xdist: all items of one loop go to one worker, which makes the loop's evidence once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_trainloop.core.finding import Result
from pytest_trainloop.core.report.entry import Entry
from pytest_trainloop.frontends.plugin.nodeids import check_in, loop_of, scopes
from pytest_trainloop.frontends.plugin.outcomes import PROPERTY


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped, import-not-found, unused-ignore]

    from pytest_trainloop.core import registry

    class LoopScheduling(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        """One scope for each loop, and one for each ordinary test."""

        _scopes: dict[str, str] | None = None

        def __init__(self, config: pytest.Config, log: Any) -> None:
            super().__init__(config, log)
            self._died: dict[str, str] = {}

        def _split_scope(self, nodeid: str) -> str:
            if self._scopes is None:
                self._scopes = scopes(self.collection or [], registry.registered())
            return self._scopes.get(nodeid, nodeid)

        def schedule(self) -> None:
            """A worker keeps its last item back until it is given another or told that it was the last: one that
            takes the place of a dead one is given a single loop, and would wait for ever."""
            replaced = self.collection is not None
            super().schedule()
            for node in self.nodes if replaced else ():
                self._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """The item in which a worker died. xdist's own would give it to every new worker again; here the other
            items of its loop are run by one more worker, and left out where that one dies in them as well."""
            workload = self.assigned_work.pop(node)
            left = [nodeid for unit in workload.values() for nodeid, done in unit.items() if not done]
            if not left:
                return None
            crashed: str = left[0]
            loop = self._split_scope(crashed)
            unit = workload[loop]
            unit[crashed] = True
            first = self._died.setdefault(loop, crashed)
            for nodeid in [n for n, done in unit.items() if not done] if first != crashed else ():
                unit[nodeid] = True
                _leave_out(config, nodeid, f"workers died in {first} and in {crashed}")
            self.workqueue.update({loop: unit for loop, unit in workload.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return LoopScheduling(config, log)


def _leave_out(config: pytest.Config, nodeid: str, reason: str) -> None:
    """Report an item that no worker runs."""
    check, file = check_in(nodeid), nodeid.partition("::")[0]
    result = Result(check=check, outcome="skipped", reason=reason, looked_at=False)
    entry = Entry(loop=loop_of(nodeid, check), nodeid=nodeid, result=result)
    report = pytest.TestReport(
        nodeid=nodeid,
        location=(file, None, file),
        keywords={},
        outcome="skipped",
        longrepr=(file, 0, f"Skipped: {reason}"),
        when="setup",
        user_properties=[(PROPERTY, json.dumps(entry.to_json()))],
    )
    config.hook.pytest_runtest_logreport(report=report)
