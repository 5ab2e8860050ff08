"""Choose checks, gate them by what a loop offers, run one. ``check_loop`` and ``check_loss`` do it without
pytest."""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.errors import (
    BrokenCheck,
    CannotDecide,
    CheckFailed,
    Unreliable,
    UsageError,
    UserCodeError,
)
from pytest_trainloop.finding import Finding, Result, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.checks import Check, Judged
    from pytest_trainloop.evidence import Evidence
    from pytest_trainloop.evidence.contracts.watching import Contracts
    from pytest_trainloop.evidence.losses import LossEvidence
    from pytest_trainloop.evidence.onebatch import Progress
    from pytest_trainloop.loop import LossContract
    from pytest_trainloop.observe.watch import Watch
    from pytest_trainloop.plan import Plan
    from pytest_trainloop.report import Report

Verdict = tuple[Finding, ...] | CannotDecide | Unreliable | UserCodeError | UserError

_FIELDS_FOR = {"fit": "fit (or step)", "run": "fit, step or loss"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How loops are judged: ``seed`` for every build and run, ``seconds`` that one run of ``fit`` may take,
    ``device`` for a device knob. ``hypothesis_seed`` is Hypothesis' own option, for the search behind a loss's
    checks."""

    seed: int = 0
    seconds: float = 120.0
    device: str = "auto"
    hypothesis_seed: str = ""


class Subject:
    """One loop, or one loss function, under judgement: the evidence made for it so far, shared by all its checks.

    ``make`` builds a fresh one when called with the user's keywords; ``knobs`` maps the plugin's knob names to those
    keywords. Only records are kept between checks: ``bind`` gives it the make of the item at hand. ``progress`` is
    told how far a long run is.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *,
        settings: Settings,
        knobs: Mapping[str, str] | None = None,
        judges: Judged = "loop",
    ) -> None:
        self.name = name
        self._judges = judges
        self._make = make
        self._settings = settings
        self._knobs = dict(knobs or {})
        self._evidence: Evidence | LossEvidence | None = None
        self._broken: tuple[UserError, str] | None = None
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self.progress: Progress = lambda step, most, loss: None

    def bind(self, make: Callable[..., Any]) -> None:
        """Use this function for runs from now on: the same loop, with the fixture values of another item."""
        self._make = make
        if self._evidence is not None:
            self._evidence.make = make

    def run_check(self, name: str, *, options: Mapping[str, Any] | None = None, reporter: str = "") -> Result:
        """The result of one check. Raises ``UsageError`` where what was given cannot be judged; never for a fault of
        the user's code.

        An exception of the user's own code is an error in the first check that meets it, and a skip that names
        ``reporter`` in the others.
        """
        from pytest_trainloop.checks import registered

        chosen = registered()[name]
        began = time.perf_counter()
        steps = self._evidence.own_steps if self._evidence is not None else 0
        result = self._judged(chosen, dict(options or {}), reporter or f"{self.name}[{name}]")
        used = (self._evidence.own_steps if self._evidence is not None else 0) - steps
        return replace(result, seconds=time.perf_counter() - began, steps=used)

    def _judged(self, check: Check, options: dict[str, Any], reporter: str) -> Result:
        if self._broken is not None:
            error, first = self._broken
            return Result(
                check=check.name, outcome="skipped", reason=f"{error.stage} raised {error.summary} (see {first})"
            )
        try:
            evidence = self._made()
            absent = sorted(need for need in check.needs if need not in evidence.offers)
        except UserCodeError as broken:
            return self._error(check, broken.error, reporter)
        if absent:
            subject = "LossContract" if check.subject == "loss" else "TrainLoop"
            field = _FIELDS_FOR.get(absent[0], absent[0])
            return Result(check=check.name, outcome="skipped", reason=f"{subject}.{field} is not given")
        return self._decided(check, evidence, options, reporter)

    def _decided(self, check: Check, evidence: Any, options: dict[str, Any], reporter: str) -> Result:
        verdict = self._verdict(check, evidence, options)
        if isinstance(verdict, UserCodeError):
            return self._error(check, verdict.error, reporter)
        if isinstance(verdict, UserError):
            reason = f"{verdict.stage} raised {verdict.summary}"
            return Result(check=check.name, outcome="error", reason=reason, error=verdict)
        if isinstance(verdict, Unreliable):
            return Result(check=check.name, outcome="unreliable", reason=str(verdict))
        findings = verdict if isinstance(verdict, tuple) else ()
        if any(f.level == "fault" for f in findings):
            return Result(check=check.name, outcome="failed", findings=findings)
        if raised := self._raised_in_fit(check, evidence):
            return self._error(check, raised, reporter)
        if isinstance(verdict, CannotDecide):
            return Result(check=check.name, outcome="skipped", reason=str(verdict))
        return Result(check=check.name, outcome="passed", findings=findings)

    def _verdict(self, check: Check, evidence: Any, options: dict[str, Any]) -> Verdict:
        """What the check says of the evidence with these options: asked once, also where another check needs to
        know."""
        key = (check.name, repr(sorted(options.items())))
        if key not in self._verdicts:
            outer, evidence.options = evidence.options, options
            try:
                self._verdicts[key] = tuple(_checked(check, finding) for finding in check.decide(evidence))
            except (CannotDecide, Unreliable, UserCodeError) as reason:
                self._verdicts[key] = reason
            except UsageError:
                raise
            except Exception as error:
                self._verdicts[key] = _broken(check, error)
            finally:
                evidence.options = outer
        return self._verdicts[key]

    def _behind(self, consequence: str) -> list[Finding]:
        """Faults of earlier families that explain a failure of this check, whatever was selected (RULINGS R9)."""
        from pytest_trainloop.checks import FAMILIES, of

        evidence, known = self._made(), of("loop")
        before = FAMILIES.index(known[consequence].family)
        causal = [c for c in known.values() if FAMILIES.index(c.family) < before and c.needs <= evidence.offers]
        verdicts = [self._verdict(check, evidence, {}) for check in causal]
        found = [f for v in verdicts if isinstance(v, tuple) for f in v if f.level == "fault"]
        return [f for f in found if consequence in f.explains]

    def _raised_in_fit(self, check: Check, evidence: Any) -> UserError | None:
        """An exception that ended fit and that no check could put down to a cause."""
        raised = evidence.run().raised if check.subject == "loop" and "run" in evidence.offers else None
        if raised is None or self._explained_elsewhere(check, evidence):
            return None
        return UserError(stage="fit", summary=raised.summary, traceback=raised.traceback)

    def _explained_elsewhere(self, asked: Check, evidence: Any) -> bool:
        """Whether another check finds the fault that made fit raise: then this one has nothing to report."""
        from pytest_trainloop.checks import of

        known = of("loop").values()
        others = [c for c in known if c.family != "learning" and c.name != asked.name and c.needs <= evidence.offers]
        verdicts = (self._verdict(other, evidence, {}) for other in others)
        return any(isinstance(v, tuple) and any(f.level == "fault" for f in v) for v in verdicts)

    def _error(self, check: Check, error: UserError, reporter: str) -> Result:
        if self._broken is not None and self._broken[1] != reporter:
            return Result(
                check=check.name,
                outcome="skipped",
                reason=f"{error.stage} raised {error.summary} (see {self._broken[1]})",
            )
        self._broken = (error, reporter)
        return Result(check=check.name, outcome="error", reason=f"{error.stage} raised {error.summary}", error=error)

    def _made(self) -> Any:
        if self._evidence is None:
            self._evidence = self._of_loss() if self._judges == "loss" else self._of_loop()
        return self._evidence

    def _of_loop(self) -> Evidence:
        from pytest_trainloop.evidence import Evidence

        settings = self._settings
        device = None if settings.device == "auto" else settings.device
        evidence = Evidence(self._make, knobs=self._knobs, seed=settings.seed, seconds=settings.seconds, device=device)
        evidence.behind = self._behind
        evidence.progress = lambda *at: self.progress(*at)
        return evidence

    def _of_loss(self) -> LossEvidence:
        from pytest_trainloop.evidence.losses import LossEvidence

        return LossEvidence(self._make, seed=self._settings.seed, hypothesis_seed=self._settings.hypothesis_seed)


def _checked(check: Check, finding: Finding) -> Finding:
    if finding.cause not in check.causes:
        raise ValueError(f"{check.name} named the cause {finding.cause!r}, which it does not declare")
    from pytest_trainloop.checks import registered

    known = registered()
    return replace(finding, check=check.name, explains=tuple(name for name in finding.explains if name in known))


def _broken(check: Check, error: Exception) -> CannotDecide | UserError:
    """What comes of a check that raised: a mistake of ours fails nobody's loop and is told loudly; a project sees its
    own check's traceback."""
    from pytest_trainloop.evidence.raised import user_error

    told = user_error(error, f"the check {check.name}")
    if not check.module.startswith("pytest_trainloop."):
        return told
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(last.filename).name}:{last.lineno}"
    reason = f"a mistake in this check, not in the loop: {told.summary} ({at}); please report it"
    warnings.warn(f"{check.name} could not be judged; {reason}", BrokenCheck, stacklevel=2)
    return CannotDecide(reason)


def check_loop(
    make: Callable[..., Any],
    *,
    only: Sequence[str] | None = None,
    skip: Mapping[str, str] | None = None,
    xfail: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    knobs: Mapping[str, str] | None = None,
    seed: int = 0,
    seconds: float = 120.0,
    device: str = "auto",
    strict: bool = False,
    raises: bool = True,
) -> Report:
    """The battery on one loop, without pytest, in a notebook or a script.

    ``make`` is the function that a test would be: it returns a fresh ``TrainLoop``, its keyword defaults are knobs;
    ``device`` is what its knob of that name is set to. Returns the report
    (``str()`` is the closing section). Raises ``CheckFailed`` with the failure texts unless ``raises=False``, and
    ``UsageError`` for what cannot be judged.

    >>> report = check_loop(make_loop, skip={"step_order": "accumulates by hand"})
    """
    from pytest_trainloop.checks import of
    from pytest_trainloop.knobs import read_knobs

    plan = _plan("check_loop", of("loop"), only, skip, xfail, options, strict)
    name, settings = getattr(make, "__name__", "loop"), Settings(seed=seed, seconds=seconds, device=device)
    subject = Subject(name, make, settings=settings, knobs=read_knobs(make, knobs))
    return _reported(name, _battery(subject, plan), raises)


def check_loss(
    make: Callable[[], LossContract] | LossContract,
    *,
    only: Sequence[str] | None = None,
    skip: Mapping[str, str] | None = None,
    xfail: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
    hypothesis_seed: str = "",
    strict: bool = False,
    raises: bool = True,
) -> Report:
    """Every property of a loss function, without pytest, in a notebook or a script.

    ``make`` is a ``LossContract``, or the function that a test would be. Returns the report and raises as
    :func:`check_loop` does.

    >>> report = check_loss(LossContract(criterion=FocalLoss(), expects="logits", num_classes=10))
    """
    from pytest_trainloop.checks import of

    plan = _plan("check_loss", of("loss"), only, skip, xfail, options, strict)
    given = make if callable(make) else lambda: make
    name = getattr(make, "__name__", "loss")
    settings = Settings(seed=seed, hypothesis_seed=hypothesis_seed)
    subject = Subject(name, given, settings=settings, judges="loss")
    return _reported(name, _battery(subject, plan), raises)


def _battery(subject: Subject, plan: Plan) -> list[Result]:
    results = []
    for check in plan.checks:
        if check in plan.skip:
            results.append(Result(check=check, outcome="skipped", reason=plan.skip[check]))
        else:
            results.append(plan.judge(subject.run_check(check, options=plan.options.get(check, {}))))
    return results


def _plan(
    where: str,
    checks: Mapping[str, Check],
    only: Sequence[str] | None,
    skip: Mapping[str, str] | None,
    xfail: Mapping[str, str] | None,
    options: Mapping[str, Mapping[str, Any]] | None,
    strict: bool,
) -> Plan:
    from pytest_trainloop.plan import choose, marker_wishes

    known = {name: tuple(check.causes) for name, check in checks.items()}
    given: dict[str, Any] = {"only": only, "skip": skip, "xfail": xfail}
    wishes = marker_wishes(where, (), {k: v for k, v in given.items() if v is not None} | dict(options or {}), known)
    return choose(known, wishes, strict=strict)


def _reported(name: str, results: Sequence[Result], raises: bool) -> Report:
    from pytest_trainloop.checks import registered
    from pytest_trainloop.report import Report
    from pytest_trainloop.report.text import failure_text

    report = Report.of(name, results)
    if raises and not report.ok:
        bad = [r for r in results if r.outcome in ("failed", "error")]
        raise CheckFailed("\n\n".join(failure_text(r, registered()[r.check].causes) for r in bad), results)
    return report


class Observation:
    """What ``observe`` watched; ``record`` is complete when its block is left."""

    def __init__(self, watch: Watch, contracts: Contracts) -> None:
        self._watch = watch
        self._contracts = contracts

    def check(self, *names: str, raises: bool = True) -> Report:
        """Judge what was watched by all checks that need only a watched run, or by the named ones.

        Raises ``CheckFailed`` with the failure texts unless ``raises=False``.
        """
        from pytest_trainloop.checks import of
        from pytest_trainloop.evidence.watched import WatchedOnce
        from pytest_trainloop.knobs import nearest

        checks = of("loop")
        for name in names:
            if name not in checks:
                raise UsageError(f"there is no check named {name!r}; {nearest(name, checks)}")
        evidence = WatchedOnce(self._watch.record, self._contracts)
        results = [_once(check, evidence) for check in checks.values() if not names or check.name in names]
        return _reported("observed", results, raises)


def _once(check: Check, evidence: Any) -> Result:
    absent = sorted(check.needs - evidence.offers)
    if absent:
        return Result(
            check=check.name,
            outcome="skipped",
            reason=f"watching once does not offer {absent[0]}: return a TrainLoop from a marked test",
        )
    try:
        findings = tuple(_checked(check, finding) for finding in check.decide(evidence))
    except CannotDecide as reason:
        return Result(check=check.name, outcome="skipped", reason=str(reason))
    failed = any(f.level == "fault" for f in findings)
    return Result(check=check.name, outcome="failed" if failed else "passed", findings=findings)


@contextlib.contextmanager
def observe(model: Any = None, optimizer: Any = None) -> Iterator[Observation]:
    """Watch any training code, unchanged, through torch's own hooks; model and optimizer are found from what runs.

    >>> with observe() as record:
    ...     main(["--config", "tiny.yaml"])
    >>> record.check()
    """
    from pytest_trainloop.evidence.contracts.watching import Contracts
    from pytest_trainloop.observe.watch import Watch

    modules = {} if model is None else model if isinstance(model, dict) else {"": model}
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    watch, contracts = Watch(modules, optimizers), Contracts()
    observation = Observation(watch, contracts)
    with watch, contextlib.ExitStack() as around:
        for context in contracts.contexts(watch):
            around.enter_context(context)
        yield observation
