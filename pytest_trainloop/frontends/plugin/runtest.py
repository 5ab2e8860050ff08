"""Run one check as one test item."""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.errors import UsageError, UserCodeError
from pytest_trainloop.core.finding import Result
from pytest_trainloop.core.report.text import failure_text
from pytest_trainloop.frontends.plugin import baselines, bundle, cards, outcomes, progress
from pytest_trainloop.frontends.plugin.collect import RETURNED, MarkedFunction, marked_function
from pytest_trainloop.frontends.plugin.nodeids import CARD, STEP_TIME, loop_of
from pytest_trainloop.frontends.plugin.settings import read_settings
from pytest_trainloop.frontends.plugin.tested_losses import contracts_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from pytest_trainloop.judging.battery import Subject


@dataclass(slots=True)
class _Loops:
    """The subjects of this session; each is let go when the last item of its loop has run."""

    subjects: dict[str, Subject] = field(default_factory=dict)
    results: dict[str, dict[str, Result]] = field(default_factory=dict)
    waiting: dict[str, dict[str, str]] = field(default_factory=dict)
    """The items of each loop that are to come, by node id, and the check of each."""
    refused: dict[tuple[str, str], str] = field(default_factory=dict)

    def subject(self, item: pytest.Function, loop: str, marked: MarkedFunction) -> Subject:
        make = _make(item)
        if loop not in self.subjects:
            from pytest_trainloop.judging import battery

            settings = read_settings(item.config)
            file = baselines.file_of(item, loop) if marked.judges == "loop" else None
            self.subjects[loop] = battery.Subject(
                loop, make, settings=settings, knobs=marked.knobs, judges=marked.judges, baseline=file
            )
            to_come = [c for c in self.waiting.get(loop, {}).values() if c not in marked.plan.skip]
            self.subjects[loop].announce({check: marked.plan.options.get(check) for check in to_come})
        self.subjects[loop].bind(make)
        return self.subjects[loop]

    def refuse(self, loop: str, check: str, nodeid: str, sentence: str) -> Result:
        """A loop that cannot be judged is an error once; the other checks that meet it say where."""
        first = self.refused.setdefault((loop, sentence), nodeid)
        if first == nodeid:
            return Result(check=check, outcome="error", reason=sentence)
        return Result(check=check, outcome="skipped", reason=f"{sentence} (see {first})")

    def done(self, nodeid: str, loop: str) -> None:
        waiting = self.waiting.get(loop, {})
        check = waiting.pop(nodeid, "")
        if loop in self.subjects:
            self.subjects[loop].drop(check)
        if not waiting:
            self.subjects.pop(loop, None)
            self.results.pop(loop, None)


_LOOPS = pytest.StashKey[_Loops]()


def pytest_collection_finish(session: pytest.Session) -> None:
    loops = session.config.stash.setdefault(_LOOPS, _Loops())
    for item in session.items:
        found = marked_function(item)
        if found is not None:
            loops.waiting.setdefault(loop_of(item.nodeid, found[0]), {})[item.nodeid] = found[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        found = marked_function(item)
        if found is not None:
            item.config.stash[_LOOPS].done(item.nodeid, loop_of(item.nodeid, found[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    found = marked_function(pyfuncitem)
    if found is None:
        late = next((name for name in RETURNED if pyfuncitem.get_closest_marker(name)), None)
        if late:
            pytest.fail(
                f"{pyfuncitem.nodeid} got its {late} marker after collection; put it on the function itself",
                pytrace=False,
            )
        return None
    if found[0] == CARD:
        _take_card(pyfuncitem, found[1])
    elif found[0] == STEP_TIME:
        _take_time(pyfuncitem, found[1])
    else:
        outcomes.settle(pyfuncitem, _judged(pyfuncitem, *found))
    return True


def _judged(item: pytest.Function, check: str, marked: MarkedFunction) -> Result:
    # The subject stays out of the frame that raises: a failure's traceback would keep it alive.
    loops = item.config.stash[_LOOPS]
    loop = loop_of(item.nodeid, check)
    subject = loops.subject(item, loop, marked)
    try:
        with (
            progress.shown(item.config, lambda: subject.seconds_left) as subject.progress,
            _contracts_beside(item, marked),
        ):
            result = subject.run_check(check, options=marked.plan.options.get(check), reporter=item.nodeid)
    except UsageError as error:
        return loops.refuse(loop, check, item.nodeid, str(error))
    if check == baselines.CHECK:
        baselines.note(item, subject.baseline)
    result = marked.plan.judge(result)
    loops.results.setdefault(loop, {})[check] = result
    if item.config.getoption("trainloop_bundle") is not None:
        bundle.note(item, result, subject, marked, lambda file: _on_batch(item, check, marked, file))
    return result


def _on_batch(item: pytest.Function, check: str, marked: MarkedFunction, file: Path) -> Result:
    """The result of a check on the batch in a file, in place of the loop's own."""
    from pytest_trainloop.judging import battery
    from pytest_trainloop.views.repro.smallest import on_batch

    make, settings = on_batch(_make(item), file), read_settings(item.config)
    subject = battery.Subject(item.nodeid, make, settings=settings, knobs=marked.knobs, judges=marked.judges)
    return marked.plan.judge(subject.run_check(check, options=marked.plan.options.get(check), reporter=item.nodeid))


def _contracts_beside(item: pytest.Function, marked: MarkedFunction) -> contextlib.AbstractContextManager[None]:
    """The contracts of losses that are tested in the same module count for a loop's calls of them."""
    if marked.judges != "loop":
        return contextlib.nullcontext()
    from pytest_trainloop.instruments.losses.table.registered import contracts_for_calls

    return contracts_for_calls(contracts_beside(item))


def _take_card(item: pytest.Function, marked: MarkedFunction) -> None:
    loops, loop = item.config.stash[_LOOPS], loop_of(item.nodeid, CARD)
    results = loops.results.get(loop, {})
    ordered = {check: results[check] for check in marked.plan.checks if check in results}
    cards.take(item, loop, loops.subject(item, loop, marked), ordered)


def _take_time(item: pytest.Function, marked: MarkedFunction) -> None:
    __tracebackhide__ = True
    from pytest_trainloop.frontends.plugin import benchmark

    loops, loop = item.config.stash[_LOOPS], loop_of(item.nodeid, STEP_TIME)
    try:
        benchmark.take(item, loops.subject(item, loop, marked))
        return
    except (UsageError, UserCodeError) as error:
        refused = loops.refuse(loop, STEP_TIME, item.nodeid, str(error))
        result = replace(refused, error=getattr(error, "error", None))
    reported = [r.check for r in loops.results.get(loop, {}).values() if r.outcome in ("failed", "error")]
    if reported or result.outcome == "skipped":
        pytest.skip(f"{result.reason} (see {reported[0]})" if reported else result.reason)
    benchmark.fail(item, failure_text(result, {}))


def _make(item: pytest.Function) -> Callable[..., Any]:
    """The user's function with this item's own fixture values; the knobs stay open."""
    given = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters if name in item.funcargs}
    make = functools.partial(item.obj, **given)
    file = item.config.stash.get(bundle.BATCH, None)
    if file is None:
        return make
    from pytest_trainloop.views.repro.smallest import on_batch

    return on_batch(make, file)
