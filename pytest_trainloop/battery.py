"""Run checks on one loop or one loss function, and keep what they share."""

from __future__ import annotations

import time
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.errors import (
    BrokenCheck,
    BrokenRun,
    CannotDecide,
    DoesNotApply,
    NotRecorded,
    TimeRanOut,
    Unreliable,
    UsageError,
    UserCodeError,
)
from pytest_trainloop.finding import Finding, Result, UserError
from pytest_trainloop.knobs import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.baseline_file import BaselineFile
    from pytest_trainloop.losses.evidence import LossEvidence
    from pytest_trainloop.registry import Cause, Check, Judged
    from pytest_trainloop.runs.evidence import Evidence, Progress

Verdict = tuple[Finding, ...] | CannotDecide | TimeRanOut | Unreliable | UserCodeError | UserError

_FIELDS_FOR = {"fit": "fit (or step)", "run": "fit, step or loss"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How loops and loss functions are judged."""

    seed: int = 0
    """The seed of every build and run."""
    timeout: float = 120.0
    """Seconds that one run of ``fit`` may take."""
    device: str = "auto"
    """The value of a knob ``device``."""
    hypothesis_seed: str = ""
    """Hypothesis' own option, for the checks of a loss function."""

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**63:
            raise UsageError(f"the seed is {self.seed!r}; a whole number from 0 to 2**63 - 1 is needed")
        if isinstance(self.timeout, (str, bool)) or not self.timeout > 0:
            raise UsageError(f"the timeout is {self.timeout!r}; a number of seconds above 0 is needed")
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"the device is {self.device!r}; auto, cpu or cuda is needed")


class Subject:
    """One loop, or one loss function, and what its checks share.

    Three things are kept between checks. The evidence: records of the runs made so far, without the user's objects. The
    verdict of every check that was asked for by name and options, since another check may need it to name a root cause.
    The first exception of the user's own code with the test that reported it: the other checks are skipped with a
    reference to it.

    ``make`` builds a fresh loop when called with the user's keywords; ``knobs`` maps the plugin's knob names to these.
    ``baseline`` is the file of the loop's baseline. ``progress`` is called in long runs with step, number of steps and
    loss.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *,
        settings: Settings,
        knobs: Mapping[str, str] | None = None,
        judges: Judged = "loop",
        baseline: BaselineFile | None = None,
    ) -> None:
        self.name = name
        self.baseline = baseline
        self._judges = judges
        self._make = make
        self._settings = settings
        self._knobs = dict(knobs or {})
        self._evidence: Evidence | LossEvidence | None = None
        self._broken: tuple[UserError, str] | None = None
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self._rates_given = False
        self.progress: Progress = lambda step, most, loss: None

    def bind(self, make: Callable[..., Any]) -> None:
        """Use this function for runs from now on: the same loop, with the fixture values of another item."""
        self._make = make
        if self._evidence is not None:
            self._evidence.make = make

    @property
    def evidence(self) -> Any:
        """What the checks share. Raises ``UserCodeError`` where the project's code raised as it was built."""
        return self._get_evidence()

    def run_check(self, name: str, *, options: Mapping[str, Any] | None = None, reporter: str = "") -> Result:
        """The result of one check.

        An exception of the user's own code is an error in the first check that meets it; the others are skipped and
        name ``reporter``. Raises ``UsageError`` where what was given cannot be judged.
        """
        from pytest_trainloop.registry import registered

        chosen = registered()[name]
        for option in options or {}:
            if option not in chosen.options:
                known = nearest(option, chosen.options) if chosen.options else "it has none"
                raise UsageError(f"{name} has no option {option!r}; {known}")
        began = time.perf_counter()
        steps = self._evidence.own_steps if self._evidence is not None else 0
        result = self._judged(chosen, dict(options or {}), reporter or f"{self.name}[{name}]")
        used = (self._evidence.own_steps if self._evidence is not None else 0) - steps
        return replace(result, seconds=time.perf_counter() - began, steps=used, rates=self._rates())

    def _rates(self) -> tuple[dict[str, Any], ...]:
        """The learning rates of the watched run, with the first result after it was made."""
        from pytest_trainloop.records.learning_rates import table

        record = getattr(self._evidence, "watched", None)
        if record is None or self._rates_given:
            return ()
        self._rates_given = True
        return tuple(table(record))

    def _judged(self, check: Check, options: dict[str, Any], reporter: str) -> Result:
        if self._broken is not None:
            return self._error(check, self._broken[0], "")
        try:
            evidence = self._get_evidence()
            absent = sorted(need for need in check.needs if need not in evidence.offers)
        except UserCodeError as broken:
            return self._error(check, broken.error, reporter)
        if absent:
            field = _FIELDS_FOR.get(absent[0], absent[0])
            if check.subject == "loss":
                return skipped(check, DoesNotApply(f"LossContract.{field} is not given"))
            return skipped(check, CannotDecide(f"TrainLoop.{field} is not given", needs=f"{absent[0]}="))
        try:
            return self._decided(check, evidence, options, reporter)
        except TimeRanOut as late:
            return Result(check=check.name, outcome="skipped", reason=str(late))

    def _decided(self, check: Check, evidence: Any, options: dict[str, Any], reporter: str) -> Result:
        verdict = self._verdict(check, evidence, options)
        if isinstance(verdict, UserCodeError) and verdict.one_check:
            return error_of(check, verdict.error)
        if isinstance(verdict, UserCodeError):
            return self._error(check, verdict.error, reporter)
        if isinstance(verdict, UserError):
            return error_of(check, verdict)
        if isinstance(verdict, TimeRanOut):
            raise verdict
        if isinstance(verdict, Unreliable):
            return Result(check=check.name, outcome="unreliable", reason=str(verdict))
        findings = verdict if isinstance(verdict, tuple) else ()
        if any(f.level == "fault" for f in findings):
            return Result(check=check.name, outcome="failed", findings=findings)
        if isinstance(verdict, NotRecorded):
            return skipped(check, verdict)  # without a run that would only say whether fit raises
        if raised := self._raised_in_fit(check, evidence):
            return self._error(check, raised, reporter)
        if isinstance(verdict, CannotDecide):
            return skipped(check, verdict)
        return Result(check=check.name, outcome="passed", findings=findings)

    def _verdict(self, check: Check, evidence: Any, options: dict[str, Any]) -> Verdict:
        """The verdict of the check with these options, made once."""
        key = (check.name, repr(sorted(options.items())))
        if key not in self._verdicts:
            try:
                self._verdicts[key] = tuple(
                    checked(check, finding, evidence) for finding in check.decide(evidence, **options)
                )
            except (CannotDecide, TimeRanOut, Unreliable, UserCodeError) as reason:
                # It is kept, and its traceback would keep the user's objects: a DataLoader with its workers.
                self._verdicts[key] = reason.with_traceback(None)
                reason.__cause__ = reason.__context__ = None
            except UsageError:
                raise
            except Exception as error:
                self._verdicts[key] = broken(check, error)
        return self._verdicts[key]

    def _root_causes(self, consequence: str) -> list[Finding]:
        """Faults of earlier families that explain a failure of this check, whatever was selected.

        See docs/how-it-decides.md#causes-before-consequences.
        """
        from pytest_trainloop.registry import FAMILIES, of

        evidence, known = self._get_evidence(), of("loop")
        before = FAMILIES.index(known[consequence].family)
        causal = [c for c in known.values() if FAMILIES.index(c.family) < before and c.needs <= evidence.offers]
        verdicts = [self._verdict(check, evidence, {}) for check in causal]
        found = [f for v in verdicts if isinstance(v, tuple) for f in v if f.level == "fault"]
        explaining = [f for f in found if consequence in {name.partition(":")[0] for name in f.explains}]
        if not explaining:
            _require_looked_at(causal, verdicts)
        return explaining

    def _raised_in_fit(self, check: Check, evidence: Any) -> UserError | None:
        """The exception that ended ``fit``, where no check found its cause."""
        try:
            raised = evidence.run().raised if check.subject == "loop" and "run" in evidence.offers else None
        except (BrokenRun, CannotDecide):
            return None  # this package made it raise, or nothing was run
        if raised is None or self._explained_elsewhere(check, evidence):
            return None
        stage = "fit" if "fit" in evidence.offers else "TrainLoop.loss"
        return UserError(stage=stage, summary=raised.summary, traceback=raised.traceback)

    def _explained_elsewhere(self, asked: Check, evidence: Any) -> bool:
        """Whether another check finds a fault, which may be what made ``fit`` raise."""
        from pytest_trainloop.registry import of

        known = of("loop").values()
        others = [c for c in known if not c.long and c.name != asked.name and c.needs <= evidence.offers]
        verdicts = []
        for other in others:
            verdicts.append(self._verdict(other, evidence, {}))
            if isinstance(verdicts[-1], tuple) and any(f.level == "fault" for f in verdicts[-1]):
                return True
        _require_looked_at(others, verdicts)
        return False

    def _error(self, check: Check, error: UserError, reporter: str) -> Result:
        """An error in the first test that meets it; a skip that names this test in the others."""
        if self._broken is not None and self._broken[1] != reporter:
            reason = f"{error.stage} raised {error.summary} (see {self._broken[1]})"
            return Result(check=check.name, outcome="skipped", reason=reason)
        self._broken = (error, reporter)
        return error_of(check, error)

    def _get_evidence(self) -> Any:
        if self._evidence is None:
            self._evidence = self._evidence_of_loss() if self._judges == "loss" else self._evidence_of_loop()
        return self._evidence

    def _evidence_of_loop(self) -> Evidence:
        from pytest_trainloop.runs.evidence import Evidence

        settings = self._settings
        device = None if settings.device == "auto" else settings.device
        evidence = Evidence(
            self._make,
            knobs=self._knobs,
            seed=settings.seed,
            timeout=settings.timeout,
            device=device,
            hypothesis_seed=settings.hypothesis_seed,
        )
        evidence.root_causes = self._root_causes
        evidence.baseline = self.baseline
        evidence.progress = lambda *at: self.progress(*at)
        return evidence

    def _evidence_of_loss(self) -> LossEvidence:
        from pytest_trainloop.losses.evidence import LossEvidence

        return LossEvidence(self._make, seed=self._settings.seed, hypothesis_seed=self._settings.hypothesis_seed)


def skipped(check: Check, why: CannotDecide) -> Result:
    """The result of a check that could not decide."""
    applies = not isinstance(why, DoesNotApply)
    return Result(check=check.name, outcome="skipped", reason=str(why), applies=applies, needs=why.needs)


def checked(check: Check, finding: Finding, evidence: Any) -> Finding:
    """The finding with what is known of its cause: the repair, the line to change, the explained checks.

    What the finding says itself counts.

    Raises ``ValueError`` for a cause that the check does not declare, and for an explained check that does not exist.
    """
    from pytest_trainloop.registry import registered

    cause = check.causes.get(finding.cause)
    if cause is None:
        raise ValueError(f"{check.name} named the cause {finding.cause!r}, which it does not declare")
    explains = finding.explains or (cause.explains if finding.level == "fault" else ())
    known = registered()
    unknown = sorted(name for name in explains if not _is_known(name, known))
    if unknown:
        raise ValueError(f"{check.name}:{finding.cause} explains {unknown[0]!r}, which is no check or cause")
    return replace(
        finding,
        check=check.name,
        kinds=finding.kinds or _kinds(check, finding, evidence),
        change=finding.change or _line_to_change(cause, finding, evidence),
        repair=_with_settlement(finding, cause, check.name),
        do_not=finding.do_not or cause.do_not,
        explains=explains,
    )


def _with_settlement(finding: Finding, cause: Cause, check: str) -> str:
    """The repair; of advice, which may be meant, also how the project says so, or that it is not."""
    repair = finding.repair or cause.repair
    if finding.level != "advice":
        return repair
    meant = f'if it is meant: skip={{"{check}:{finding.cause}": "why"}}'
    return "; ".join(filter(None, (repair, cause.settle, meant)))


def _is_known(name: str, checks: Mapping[str, Check]) -> bool:
    check, colon, cause = name.partition(":")
    return check in checks and (not colon or cause in checks[check].causes)


def _kinds(check: Check, finding: Finding, evidence: Any) -> tuple[str, ...]:
    """What each of the finding's names is, by the record of the loop."""
    if check.subject != "loop" or not finding.culprits:
        return ()
    record = evidence.run()
    known = {p.name: "parameter" for p in record.parameters} | {s.name: "buffer" for s in record.statistics}
    paths = {".".join(p.owner.split(".")[:n]) for p in record.parameters for n in range(1, p.owner.count(".") + 2)}
    modules = dict.fromkeys(paths - {""}, "module")
    inputs = {name: "input" for name in finding.culprits if name.startswith("batch")}
    calls = {name: "call" for name in finding.culprits if name.endswith(")")}
    kinds = {**modules, **calls, **known, **inputs}
    return tuple(kinds.get(name, kinds.get(name.removeprefix("model."), check.names)) for name in finding.culprits)


def _line_to_change(cause: Cause, finding: Finding, evidence: Any) -> str:
    """The first line that the cause asks for and that is known."""
    for part in cause.change:
        if part == "seen":
            line = finding.where
        else:
            from pytest_trainloop.tracing.made_at import line_of

            line = line_of(part, finding, evidence)
        if line:
            return line
    return ""


def _require_looked_at(checks: Sequence[Check], verdicts: Sequence[Verdict]) -> None:
    """Raise ``TimeRanOut`` where one of the checks, which may have found the cause, was not through in time."""
    for check, verdict in zip(checks, verdicts, strict=False):
        if isinstance(verdict, TimeRanOut):
            raise TimeRanOut(verdict.steps, verdict.seconds, where=f" of {check.name}, which may know the cause")


def error_of(check: Check, error: UserError) -> Result:
    """The result of a check that met an exception of the project's."""
    reason = f"{error.stage} raised {error.summary}"
    return Result(check=check.name, outcome="error", reason=reason, error=error)


def broken(check: Check, error: Exception) -> CannotDecide | UserError:
    """The verdict of a check that raised: a skip and a warning for one of this package, whose mistake fails nobody's
    loop; an error with its traceback for a project's own."""
    if isinstance(error, BrokenRun):
        return _reported(check, f"{error}; please report it")
    from pytest_trainloop.runs.user_traceback import user_error

    raised = user_error(error, f"the check {check.name}")
    if not check.module.startswith("pytest_trainloop."):
        return raised
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(last.filename).name}:{last.lineno}"
    return _reported(check, f"a mistake in this check, not in the loop: {raised.summary} ({at}); please report it")


def _reported(check: Check, reason: str) -> CannotDecide:
    """A skip for a mistake of this package, with a warning."""
    warnings.warn(f"{check.name} could not be judged; {reason}", BrokenCheck, stacklevel=2)
    return CannotDecide(reason)
