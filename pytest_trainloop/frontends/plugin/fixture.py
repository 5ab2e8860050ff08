"""The ``trainloop`` fixture: checks called from a test function."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core import registry
from pytest_trainloop.core.errors import CheckFailed, TrainLoopError, UsageError
from pytest_trainloop.core.finding import Result
from pytest_trainloop.core.report.entry import Entry
from pytest_trainloop.core.report.text import failure_text
from pytest_trainloop.declare.knobs import nearest, read_knobs, require_defaults
from pytest_trainloop.declare.selection import choose, marker_selection, validate
from pytest_trainloop.frontends import api
from pytest_trainloop.frontends.plugin import baselines, cards
from pytest_trainloop.frontends.plugin.outcomes import PROPERTY, causes, location, skip_reason
from pytest_trainloop.frontends.plugin.settings import is_strict, read_selections, read_settings
from pytest_trainloop.judging import battery

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from pytest_trainloop.core.report import Report
    from pytest_trainloop.declare.baseline_file import BaselineFile
    from pytest_trainloop.declare.selection import Plan
    from pytest_trainloop.views.loop_facts.page import Card

_RESULTS = pytest.StashKey[list[Result]]()
_HAS_BASELINE = pytest.StashKey[bool]()
_OBSERVED = pytest.StashKey[list["Observed"]]()


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
            if judges == "loop":
                require_defaults(make, "trainloop.check()")
            own = read_knobs(make, knobs) if judges == "loop" else {}
            file = self._baseline() if name == baselines.CHECK else None
            subject = battery.Subject(
                self._item.nodeid, make, settings=settings, knobs=own, judges=judges, baseline=file
            )
            result = subject.run_check(name, options=options, reporter=self._item.nodeid)
            baselines.note(self._item, file)
        except UsageError as error:
            raise UsageError(str(error)) from None  # the sentence is enough: nobody reads our frames
        result = choose({name: tuple(known[name].causes)}, strict=is_strict(self._item.config)).judge(result)
        self._note([result])
        if result.outcome == "error":
            raise TrainLoopError(failure_text(result, {}))
        if result.outcome == "failed":
            raise CheckFailed(failure_text(result, causes(name)), [result])
        return result

    def _baseline(self) -> BaselineFile:
        """The file of this test's baseline, once."""
        if self._item.stash.get(_HAS_BASELINE, False):
            raise UsageError(
                "trainloop.check('baseline', ...) is called twice in one test, which has one file; parametrize the "
                "test, or give each call its own: trainloop.check_loop(make, only=['baseline'], baseline=FILE)"
            )
        self._item.stash[_HAS_BASELINE] = True
        return baselines.file_of(self._item, self._item.nodeid)

    def check_loop(self, make: Callable[..., Any], **choice: Any) -> Report:
        """All checks on loops from ``make``, with the keywords of :func:`pytest_trainloop.check_loop`.

        A file that is given with ``baseline=`` is written by ``--trainloop-update`` and ``--trainloop-update-new``.
        """
        __tracebackhide__ = True
        own: dict[str, Any] = {"timeout": read_settings(self._item.config).timeout}
        if choice.get("baseline") is not None:
            own["update"] = {"update": True, "new": "new", "check": False}[baselines.mode_of(self._item.config)]
        return self._all(api.check_loop, make, own, choice)

    def card(self, make: Callable[..., Any], **choice: Any) -> Card:
        """The card of a loop, with the keywords of :func:`pytest_trainloop.card`; with ``--trainloop-card`` it is shown
        and stored as that of a marked function."""
        __tracebackhide__ = True
        settings = read_settings(self._item.config)
        given = {"seed": settings.seed, "timeout": settings.timeout, "device": settings.device}
        made = api.card(make, **{**given, **choice})
        cards.note(self._item, self._item.nodeid, made)
        return made

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
        """Watch any training code; the observation's ``check()`` judges what ran, and must be called."""
        with api.observe(**settings) as observation:
            observed = Observed(observation, self._item.config, self._note)
            self._item.stash.setdefault(_OBSERVED, []).append(observed)
            yield observed

    def _note(self, results: Sequence[Result]) -> None:
        self._item.stash.setdefault(_RESULTS, []).extend(results)
        for result in results:
            entry = Entry(loop=self._item.nodeid, nodeid=self._item.nodeid, result=result)
            self._item.user_properties.append((PROPERTY, json.dumps(entry.to_json())))


class Observed:
    """An observation whose results reach the reports, and for which the ini file and the command line count."""

    def __init__(
        self, observation: api.Observation, config: pytest.Config, note: Callable[[Sequence[Result]], None]
    ) -> None:
        self._observation = observation
        self._config = config
        self._note = note
        self.judged = False
        """Whether ``check`` was called."""

    def check(
        self,
        *names: str,
        skip: Mapping[str, str] | None = None,
        xfail: Mapping[str, str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        strict: bool = False,
        raises: bool = True,
    ) -> Report:
        """Judge what was seen, by the named checks or by all; raises ``CheckFailed`` unless ``raises=False``.

        ``skip``, ``xfail`` and ``options`` are as in the marker. ``--trainloop-only``, ``--trainloop-strict`` and the
        keys of the ini file count as they do for a marked function.
        """
        __tracebackhide__ = True
        self.judged = True
        own: dict[str, Any] = {"only": list(names) or None, "skip": skip, "xfail": xfail, **(options or {})}
        try:
            api.require_names(names, registry.of("loop"))
            plan = self._plan({key: value for key, value in own.items() if value is not None}, strict=strict)
            if not plan.checks:
                pytest.skip("no check is left: record.check(), the ini file and --trainloop-only choose different ones")
            report = self._observation.judged(plan, raises=raises)
        except CheckFailed as error:
            self._note(error.results)
            raise CheckFailed(str(error), error.results) from None
        except UsageError as error:
            raise UsageError(str(error)) from None
        self._note(report.results)
        return report

    def _plan(self, own: Mapping[str, Any], *, strict: bool) -> Plan:
        known = {name: tuple(check.causes) for name, check in registry.registered().items()}
        of_loops = {name: known[name] for name in registry.of("loop")}
        selection = marker_selection("record.check()", (), own, of_loops)
        validate(selection, of_loops)
        strict = strict or is_strict(self._config)
        return choose(known, selection, *read_selections(self._config), strict=strict, among=of_loops)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observation, name)


class Outcomes:
    """Begin the short summary with the finding; skip a test none of whose checks could decide, with their reasons; fail
    one that observed and never judged."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        results = item.stash.get(_RESULTS, [])
        crash = getattr(report.longrepr, "reprcrash", None)
        if call.excinfo is not None and isinstance(call.excinfo.value, (CheckFailed, UsageError)) and crash is not None:
            crash.message = str(call.excinfo.value)  # the short summary begins with the finding, not with our class
        if report.when != "call" or not report.passed:
            return report
        if not all(observed.judged for observed in item.stash.get(_OBSERVED, [])):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} observed a block and never judged it; call record.check() after the block"
        elif results and all(result.outcome in ("skipped", "unreliable") for result in results):
            reasons = "; ".join(dict.fromkeys(f"{r.check}: {skip_reason(r)}" for r in results))
            report.outcome = "skipped"
            report.longrepr = (*location(item), f"Skipped: {reasons}")
        return report
