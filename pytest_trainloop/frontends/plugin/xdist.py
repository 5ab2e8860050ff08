"""xdist: all items of one loop go to one worker, which makes the loop's evidence once; a worker may die."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped, import-not-found, unused-ignore]

from pytest_trainloop.core import registry
from pytest_trainloop.core.wording import some
from pytest_trainloop.frontends.plugin import deaths
from pytest_trainloop.frontends.plugin.nodeids import NO_CHECKS, check_in, scopes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Workers:
    """Chooses what each worker runs, and reports the check in which one died."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[str, int | None, str]] = {}
        self._scheduling: LoopScheduling | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> LoopScheduling | None:
        def leave_out(nodeid: str, after: Sequence[str]) -> None:
            report = deaths.left_out(nodeid, self._place(after[0]), after)
            config.hook.pytest_runtest_logreport(report=report)

        if config.getoption("dist") == "load":
            self._scheduling = LoopScheduling(config, log, leave_out)
        return self._scheduling

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._begun[nodeid] = location

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """Before the report is shown: xdist's own has no phase and no result."""
        check = check_in(crashitem)
        if check in NO_CHECKS or check in registry.registered():
            died = deaths.died(crashitem, self._place(crashitem), _exit_code(report.node), "-n0 ")
            vars(report).update(vars(died))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._scheduling is not None and (left := self._scheduling.never_run()):
            sentence = f"not run, since workers died: {some(left, most=3)}; --max-worker-restart=N replaces N of them"
            terminalreporter.write_line(f"trainloop: {sentence}", red=True, bold=True)

    def _place(self, nodeid: str) -> tuple[str, int | None, str]:
        return self._begun.get(nodeid, (nodeid.partition("::")[0], None, ""))


def _exit_code(worker: Any) -> int | None:
    """The exit code of a worker's process; None where execnet does not say it, as for a worker on another machine."""
    process = getattr(getattr(worker.gateway, "_io", None), "popen", None)
    try:
        return process.wait(timeout=2) if isinstance(process, subprocess.Popen) else None
    except subprocess.TimeoutExpired:
        return None


class LoopScheduling(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
    """One scope for each loop, and one for each ordinary test; ``leave_out`` reports an item that is not run.

    After a worker died, xdist 3.8 runs the item again in the next worker, and waits for ever where that one gets a
    single item, or a scope whose items have all run: https://github.com/pytest-dev/pytest-xdist/issues/1323, /1327.
    """

    def __init__(self, config: Any, log: Any, leave_out: Callable[[str, Sequence[str]], None]) -> None:
        super().__init__(config, log)
        self._leave_out = leave_out
        self._scopes: dict[str, str] = {}
        self._deaths: dict[str, list[str]] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._scopes:
            self._scopes = scopes(self.collection or [], registry.registered())
        return self._scopes.get(nodeid, nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Give the items of a worker to others, its loop after all others; the item in which it died counts as run."""
        left = {scope: items for scope, items in self.assigned_work.pop(node).items() if not all(items.values())}
        if not left:
            return None
        loop, items = next(iter(left.items()))
        died: str = next(nodeid for nodeid, done in items.items() if not done)
        items[died] = True
        self._deaths.setdefault(loop, []).append(died)
        if len(self._deaths[loop]) == deaths.AT_MOST:
            for nodeid in [nodeid for nodeid, done in items.items() if not done]:
                items[nodeid] = True
                self._leave_out(nodeid, self._deaths[loop])
        left[loop] = left.pop(loop)
        self.workqueue.update({scope: items for scope, items in left.items() if not all(items.values())})
        for other in self.nodes:
            self._reschedule(other)
        return died

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            node.shutdown()  # it collected other items than the first workers: none can be given to it

    def never_run(self) -> list[str]:
        """The loops and tests that are left where workers died and no worker is there any more."""
        return list(self.workqueue) if self._deaths else []

    def _reschedule(self, node: Any) -> None:
        """Give a worker items until it has two: it begins one when it knows the next, or that there is none."""
        while node in self.registered_collections and not node.shutting_down:  # a new worker may still collect
            super()._reschedule(node)
            if self._pending_of(self.assigned_work[node]) >= 2:
                return
