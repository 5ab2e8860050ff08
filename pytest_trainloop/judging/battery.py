"""Run checks on one loop or one loss function, and keep what they share."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import (
    CannotDecide,
    DoesNotApply,
    NotRecorded,
    OutOfBudget,
    OwnMistake,
    TimeRanOut,
    Unreliable,
    UsageError,
    UserCodeError,
)
from pytest_trainloop.core.finding import Finding, Result, UserError
from pytest_trainloop.core.whose import SIGNALS
from pytest_trainloop.core.wording import count
from pytest_trainloop.declare.knobs import DEVICES, is_device, nearest
from pytest_trainloop.declare.script import OnlyAScript
from pytest_trainloop.judging.check_order import WATCHED, Cost, Waiting
from pytest_trainloop.judging.results import broken, checked, error_of, mistaken, skipped
from pytest_trainloop.runs.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.core.registry import Check, Judged
    from pytest_trainloop.declare.baseline_file import BaselineFile
    from pytest_trainloop.declare.script import Script
    from pytest_trainloop.instruments.losses.evidence import LossEvidence
    from pytest_trainloop.judging.script import ScriptRun
    from pytest_trainloop.runs.evidence import Evidence, Progress

Verdict = tuple[Finding, ...] | CannotDecide | OwnMistake | TimeRanOut | Unreliable | UserCodeError | UserError

LEAST_BUDGET = 120.0
"""Seconds that the checks of one loop may take however short the time of a run is, where no budget is given."""

_FIELDS_FOR = {
    "fit": "fit (or step)",
    "run": "fit, step or loss",
    "load": "load (load(state) with a save() that returns it, or load(path) with save(path))",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How loops and loss functions are judged."""

    seed: int = 0
    """The seed of every build and run."""
    timeout: float = 120.0
    """Seconds that one run of ``fit`` may take."""
    device: str = "auto"
    """The value of a knob ``device``: auto, cpu, cuda, or one of several CUDA devices, as in cuda:1."""
    hypothesis_seed: str = ""
    """Hypothesis' own option, for the checks of a loss function."""
    budget: float | None = None
    """Seconds that all checks of one loop may take; default: ``timeout``, and at least 120."""
    preview: bool = False
    """Whether causes are reported whose status is "preview"."""

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**63:
            raise UsageError(f"the seed is {self.seed!r}; a whole number from 0 to 2**63 - 1 is needed")
        if isinstance(self.timeout, (str, bool)) or not self.timeout > 0:
            raise UsageError(f"the timeout is {self.timeout!r}; a number of seconds above 0 is needed")
        if self.budget is not None and (isinstance(self.budget, (str, bool)) or not self.budget > 0):
            raise UsageError(f"the budget is {self.budget!r}; a number of seconds above 0 is needed")
        if not is_device(self.device):
            raise UsageError(f"the device is {self.device!r}; {DEVICES} is needed")

    @property
    def loop_seconds(self) -> float:
        """Seconds that all checks of one loop may take."""
        return max(self.timeout, LEAST_BUDGET) if self.budget is None else self.budget


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
        self._script: ScriptRun | UsageError | None = None
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self._lrs_given = False
        self._budget = Budget(settings.loop_seconds)
        self._budget.needed = lambda: self._budget.spent + self._to_come()
        self._waiting = Waiting()
        self._ahead: dict[str, Cost] = {}
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
        name ``reporter``. A mistake of this package is an error in every check that meets it. Raises ``UsageError``
        where what was given cannot be judged.
        """
        from pytest_trainloop.core.registry import registered

        chosen = registered()[name]
        for option in options or {}:
            if option not in chosen.options:
                known = nearest(option, chosen.options) if chosen.options else "it has none"
                raise UsageError(f"{name} has no option {option!r}; {known}")
        reporter = reporter or f"{self.name}[{name}]"
        try:
            result = self._counted(chosen, dict(options or {}), reporter)
        except OnlyAScript as given:
            result = self._of_script(given.script, chosen, reporter)
        except UsageError:
            raise
        except Exception as error:  # outside of the check itself: what is done for all checks
            result = _stopped(chosen, error)
        self._waiting.drop(name)
        return result

    def _of_script(self, script: Script, check: Check, reporter: str) -> Result:
        """The result of a check on a script, which is run once for all of them."""
        if self._settings.device != "auto":
            raise UsageError(
                f"--trainloop-device={self._settings.device} does not reach a script: give it by Script(args=), as the "
                "script takes it"
            )
        if self._script is None:
            from pytest_trainloop.judging.script import ScriptRun

            try:
                self._script = ScriptRun(script, self._settings.loop_seconds)
            except UsageError as error:
                self._script = error
        if isinstance(self._script, UsageError):
            raise self._script
        return self._script.of(check.name, reporter)

    def _counted(self, check: Check, options: dict[str, Any], reporter: str) -> Result:
        """The result of a check, with what it cost."""
        with self._budget.counted(), self._few_threads():
            before = self._cost()
            others = self._judge_what_is_worth_more(check)
            result = self._judged(check, options, reporter)
            cost = self._cost() - before - others + self._ahead.pop(check.name, Cost())
        off = 0 if self._settings.preview else len(check.previews)
        return replace(result, seconds=cost.seconds, steps=cost.steps, learning_rates=self._lrs(), previews_off=off)

    def _few_threads(self) -> contextlib.AbstractContextManager[None]:
        """What a check computes of the loop's records takes as many threads as the loop; losses have their own rule."""
        threads = getattr(self._evidence, "threads", None)
        return contextlib.nullcontext() if threads is None else threads.used()

    def announce(self, checks: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Say which checks will be asked for, with their options: where time is short, they are made in another
        order."""
        self._waiting.announce({name: dict(options or {}) for name, options in checks.items()})

    def drop(self, name: str) -> None:
        """Say that this check will not be asked for any more."""
        self._waiting.drop(name)

    @property
    def seconds_left(self) -> float:
        """An estimate of the time until the loop's checks are through or their time is over; infinite where nothing is
        known."""
        to_come = self._to_come()
        return min(to_come, self._budget.left) if to_come < math.inf else math.inf

    def _to_come(self) -> float:
        """An estimate of what the announced checks would take yet; infinite where nothing is known."""
        from pytest_trainloop.core.registry import of

        evidence: Any = self._evidence
        if getattr(evidence, "watched", None) is None:
            return math.inf
        return self._waiting.seconds(self._budget.spent, of("loop"), evidence.offers)

    def _judge_what_is_worth_more(self, check: Check) -> Cost:
        """Where the time may not do for all checks, first those that name more causes for theirs; what they cost."""
        from pytest_trainloop.core.registry import of

        spent = Cost()
        if check.subject == "loss" or self._broken is not None:
            return spent
        with contextlib.suppress(*SIGNALS):  # the check meets it as well
            evidence = self._get_evidence()
            if check.steps > WATCHED:
                evidence.run()
            if self._budget.spent + self._to_come() <= self._budget.seconds or evidence.watched is None:
                return spent
            for other, options in self._waiting.worth_more(check, of("loop"), evidence.offers):
                before = self._cost()
                with contextlib.suppress(UsageError):
                    self._verdict(other, evidence, dict(options))
                cost = self._cost() - before
                self._ahead[other.name] = self._ahead.get(other.name, Cost()) + cost
                spent += cost
        return spent

    def _cost(self) -> Cost:
        """What all checks cost so far."""
        return Cost(self._budget.spent, 0 if self._evidence is None else self._evidence.own_steps)

    def _lrs(self) -> tuple[dict[str, Any], ...]:
        """The learning rates of the watched run, with the first result after it was made."""
        from pytest_trainloop.instruments.records.learning_rates import table

        record = getattr(self._evidence, "watched", None)
        if record is None or self._lrs_given:
            return ()
        self._lrs_given = True
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
            needs = "load=, save=" if "load" in absent else f"{absent[0]}="
            if check.subject == "loss":
                return skipped(check, DoesNotApply(f"LossContract.{field} is not given"))
            return skipped(check, CannotDecide(f"TrainLoop.{field} is not given", needs=needs))
        try:
            return self._decided(check, evidence, options, reporter)
        except TimeRanOut as late:
            looked_at = not isinstance(late, OutOfBudget)
            return Result(check=check.name, outcome="skipped", reason=str(late), looked_at=looked_at)

    def _decided(self, check: Check, evidence: Any, options: dict[str, Any], reporter: str) -> Result:
        verdict = self._verdict(check, evidence, options)
        if isinstance(verdict, UserCodeError) and verdict.one_check:
            return error_of(check, verdict.error)
        if isinstance(verdict, UserCodeError):
            return self._error(check, verdict.error, reporter)
        if isinstance(verdict, UserError):
            return error_of(check, verdict)
        if isinstance(verdict, OwnMistake):
            return mistaken(check, verdict)
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
        if not findings and (ended := self._ended_early(check, evidence)):
            return skipped(check, CannotDecide(ended))
        return Result(check=check.name, outcome="passed", findings=findings)

    def _verdict(self, check: Check, evidence: Any, options: dict[str, Any]) -> Verdict:
        """The verdict of the check with these options, made once."""
        key = (check.name, repr(sorted(options.items())))
        if key not in self._verdicts:
            try:
                off = frozenset() if self._settings.preview else check.previews
                reported = (finding for finding in check.decide(evidence, **options) if finding.cause not in off)
                found = tuple(checked(check, finding, evidence) for finding in reported)
                if not found and check.absent is not None and (why := check.absent(evidence)):
                    raise DoesNotApply(why)
                self._verdicts[key] = found
                self._waiting.note(check.steps)
            except (CannotDecide, TimeRanOut, Unreliable, UserCodeError) as reason:
                over = self._budget.over() if isinstance(reason, TimeRanOut) else None
                # It is kept, and its traceback would keep the user's objects: a DataLoader with its workers.
                self._verdicts[key] = over or reason.with_traceback(None)
                reason.__cause__ = reason.__context__ = None
            except UsageError:
                raise
            except Exception as error:
                self._verdicts[key] = broken(check, error)
            if check.subject == "loop":
                evidence.release()
        return self._verdicts[key]

    def _root_causes(self, consequence: str) -> list[Finding]:
        """Faults of earlier families that explain a failure of this check, whatever was selected.

        See docs/how-it-decides.md#causes-before-consequences.
        """
        from pytest_trainloop.core.registry import FAMILIES, of

        evidence, known = self._get_evidence(), of("loop")
        before = FAMILIES.index(known[consequence].family)
        causal = [c for c in known.values() if FAMILIES.index(c.family) < before and c.needs <= evidence.offers]
        verdicts = [self._verdict(check, evidence, {}) for check in causal]
        found = [f for v in verdicts if isinstance(v, tuple) for f in v if f.level == "fault"]
        explaining = [f for f in found if consequence in {name.partition(":")[0] for name in f.explains}]
        if not explaining:
            _require_looked_at(causal, verdicts)
        return explaining

    def _ended_early(self, check: Check, evidence: Any) -> str:
        """Why a check that found nothing saw only a part of the run; empty where it saw all of it."""
        if check.subject != "loop" or "run" not in evidence.offers:
            return ""
        try:
            record = evidence.run()
        except CannotDecide:
            return ""  # nothing was run: the check looked at what was built
        if record.raised is None:
            return ""
        steps = count(record.steps, "optimizer step")
        return f"fit raised after {steps}, and what would follow was not seen: {record.raised.summary}"

    def _raised_in_fit(self, check: Check, evidence: Any) -> UserError | None:
        """The exception that ended ``fit``, where no check found its cause."""
        try:
            raised = evidence.run().raised if check.subject == "loop" and "run" in evidence.offers else None
        except CannotDecide:
            return None  # nothing was run
        if raised is None or self._explained_elsewhere(check, evidence):
            return None
        stage = "fit" if "fit" in evidence.offers else "TrainLoop.loss"
        return UserError(stage=stage, summary=raised.summary, traceback=raised.traceback)

    def _explained_elsewhere(self, asked: Check, evidence: Any) -> bool:
        """Whether another check finds a fault, which may be what made ``fit`` raise."""
        from pytest_trainloop.core.registry import of

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
        from pytest_trainloop.core.registry import of
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
            budget=self._budget,
        )
        evidence.tick = lambda steps: self.progress(steps, 0, 0.0)
        evidence.root_causes = self._root_causes
        evidence.listeners = lambda: self._waiting.listeners(of("loop"))
        evidence.baseline = self.baseline
        evidence.progress = lambda *at: self.progress(*at)
        return evidence

    def _evidence_of_loss(self) -> LossEvidence:
        from pytest_trainloop.instruments.losses.evidence import LossEvidence

        return LossEvidence(self._make, seed=self._settings.seed, hypothesis_seed=self._settings.hypothesis_seed)


def _stopped(check: Check, error: Exception) -> Result:
    """The result where an exception ended what is done for all checks."""
    verdict = broken(check, error)
    return mistaken(check, verdict) if isinstance(verdict, OwnMistake) else error_of(check, verdict)


def _require_looked_at(checks: Sequence[Check], verdicts: Sequence[Verdict]) -> None:
    """Raise ``TimeRanOut`` where one of the checks, which may have found the cause, was not through in time, and
    ``OwnMistake`` where a mistake of this package stopped it."""
    for check, verdict in zip(checks, verdicts, strict=False):
        if isinstance(verdict, OwnMistake):
            raise verdict
        if isinstance(verdict, OutOfBudget):
            raise OutOfBudget(verdict.seconds, verdict.needed)
        if isinstance(verdict, TimeRanOut):
            raise TimeRanOut(verdict.steps, verdict.seconds, where=f" of {check.name}, which may know the cause")
