"""The ``trainloop`` fixture: checks called from a test function."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop import api, battery, registry
from pytest_trainloop.errors import CheckFailed, TrainLoopError, UsageError
from pytest_trainloop.finding import Result
from pytest_trainloop.knobs import nearest, read_knobs
from pytest_trainloop.plugin.outcomes import PROPERTY, causes, location, skip_reason
from pytest_trainloop.plugin.settings import is_strict, read_settings
from pytest_trainloop.report.entry import Entry
from pytest_trainloop.report.text import failure_text
from pytest_trainloop.selection import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from pytest_trainloop.report import Report

_RESULTS = pytest.StashKey[list[Result]]()


def start(request: pytest.FixtureRequest) -> TrainloopFixture:
    """The fixture's value."""
    manager = request.config.pluginmanager
    if not manager.has_plugin("trainloop-fixture"):
        manager.register(Outcomes(), "trainloop-fixture")
    return TrainloopFixture(request.node)


class TrainloopFixture:
    """Checks of training loops, called from a test function.

    >>> def test_accumulation(trainloop):
    ...     trainloop.check("accumulation_equivalence", make_loop)
    """

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def check(
        self,
        name: str,
        make: Callable[..., Any],
        *,
        options: Mapping[str, Any] | None = None,
        knobs: Mapping[str, str] | None = None,
    ) -> Result:
        """Run one check on fresh loops from ``make``; raises ``CheckFailed`` where it finds a fault."""
        __tracebackhide__ = True
        known = registry.registered()
        if name not in known:
            raise UsageError(f"trainloop.check got {name!r}, which is no check; {nearest(name, known)}")
        try:
            settings = read_settings(self._item.config)
            judges = known[name].subject
            own = read_knobs(make, knobs) if judges == "loop" else {}
            subject = battery.Subject(self._item.nodeid, make, settings=settings, knobs=own, judges=judges)
            result = subject.run_check(name, options=options, reporter=self._item.nodeid)
        except UsageError as error:
            raise UsageError(str(error)) from None  # the sentence is enough: nobody reads our frames
        result = choose({name: tuple(known[name].causes)}, strict=is_strict(self._item.config)).judge(result)
        self._note([result])
        if result.outcome == "error":
            raise TrainLoopError(failure_text(result, {}))
        if result.outcome == "failed":
            raise CheckFailed(failure_text(result, causes(name)), [result])
        return result

    def check_loop(self, make: Callable[..., Any], **choice: Any) -> Report:
        """All checks on loops from ``make``, with the keywords of :func:`pytest_trainloop.check_loop`."""
        __tracebackhide__ = True
        return self._all(api.check_loop, make, {"timeout": read_settings(self._item.config).timeout}, choice)

    def check_loss(self, make: Any, **choice: Any) -> Report:
        """Every property of a loss function, with the keywords of :func:`pytest_trainloop.check_loss`."""
        __tracebackhide__ = True
        own = {"hypothesis_seed": read_settings(self._item.config).hypothesis_seed}
        return self._all(api.check_loss, make, own, choice)

    def _all(self, check: Callable[..., Report], make: Any, own: dict[str, Any], choice: dict[str, Any]) -> Report:
        __tracebackhide__ = True
        given = {"seed": read_settings(self._item.config).seed, "strict": is_strict(self._item.config), **own}
        try:
            report = check(make, **{**given, **choice})
        except CheckFailed as error:
            self._note(error.results)
            raise CheckFailed(str(error), error.results) from None
        self._note(report.results)
        return report

    @contextmanager
    def observe(self, **settings: Any) -> Iterator[Observed]:
        """Watch any training code; the observation's ``check()`` judges what ran."""
        with api.observe(**settings) as observation:
            yield Observed(observation, self._note)

    def _note(self, results: Sequence[Result]) -> None:
        self._item.stash.setdefault(_RESULTS, []).extend(results)
        for result in results:
            entry = Entry(loop=self._item.nodeid, nodeid=self._item.nodeid, result=result)
            self._item.user_properties.append((PROPERTY, json.dumps(entry.to_json())))


class Observed:
    """An observation whose results reach the reports."""

    def __init__(self, observation: api.Observation, note: Callable[[Sequence[Result]], None]) -> None:
        self._observation = observation
        self._note = note

    def check(self, *names: str, raises: bool = True) -> Report:
        """Judge what was seen, by the named checks or by all; raises ``CheckFailed`` unless ``raises=False``."""
        __tracebackhide__ = True
        try:
            report = self._observation.check(*names, raises=raises)
        except CheckFailed as error:
            self._note(error.results)
            raise CheckFailed(str(error), error.results) from None
        self._note(report.results)
        return report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observation, name)


class Outcomes:
    """Begin the short summary with the finding; skip a test none of whose checks could decide, with their reasons."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        results = item.stash.get(_RESULTS, [])
        crash = getattr(report.longrepr, "reprcrash", None)
        if call.excinfo is not None and isinstance(call.excinfo.value, CheckFailed) and crash is not None:
            crash.message = str(call.excinfo.value)  # the short summary begins with the finding, not with our class
        undecided = results and all(result.outcome in ("skipped", "unreliable") for result in results)
        if report.when == "call" and report.passed and undecided:
            reasons = "; ".join(dict.fromkeys(f"{r.check}: {skip_reason(r)}" for r in results))
            report.outcome = "skipped"
            report.longrepr = (*location(item), f"Skipped: {reasons}")
        return report
