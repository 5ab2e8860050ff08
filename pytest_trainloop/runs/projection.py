"""Where the schedules of a loop go: every scheduler of a thrown-away loop, stepped on without training.

A run of a few batches shows how often a scheduler is called; the calls that would follow show where its rates go. How
long the real training is, only ``steps=`` and ``epochs=`` say, or ``fit`` itself: where it sizes the schedule by the
batches that it is given and comes to its own end, it is its own plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.recording.events import SchedulerStep
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.run import fit_of
from pytest_trainloop.runs.scheduled import Curve, Driven, Schedules, lrs_of, project

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.scheduled import LearningRates

Unit = Literal["step", "micro-batch", "epoch"]

AHEAD = 20_000
"""Calls that are looked ahead at least."""

FEW_AHEAD = 600
"""The same in a run that only shows what a schedule is sized by."""

SIZES = (2, 3)
"""Windows in the two runs that show what a schedule is sized by."""

MOST_ROUNDS = 48
"""Steps of one optimizer after which these runs end: 24 passes over two windows."""

LONGEST_WINDOW = 8

CYCLIC = ("CosineAnnealingWarmRestarts", "CyclicLR")
"""Schedulers whose rates are to rise again."""

ACCUMULATE = 4


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run, or the whole training, has of each unit; None where it is not known."""

    steps: int | None
    micro_batches: int | None
    passes: int | None

    def of(self, unit: Unit) -> int | None:
        return {"step": self.steps, "micro-batch": self.micro_batches, "epoch": self.passes}[unit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The schedule of one optimizer as a trainer of a library would build and call it in its own training."""

    schedulers: tuple[Any, ...]
    optimizer: Any
    unit: Unit
    calls: int
    """Calls in the whole training."""
    counts: Counts
    place: str = ""
    """The user's line that sets it up."""
    declared: bool = False
    """Whether the project itself says how long the training is; else it follows from data that may be a test's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The same schedule in one run of a few batches."""

    counts: Counts
    calls: int
    curve: Curve | None
    horizon: int | None
    windows: int
    """Items of a pass over those that a step takes."""
    ended: bool
    """Whether ``fit`` came to its own end."""
    raised: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """The schedule of one optimizer."""

    kind: str
    """The class of its scheduler; of several that are called on one optimizer, all."""
    optimizer: int
    made_in_fit: bool
    place: str
    """The user's line that calls it."""
    made_at: str
    """The user's line that builds it."""
    made_at_line: tuple[str, int] = ("", 0)
    """The same as file and line."""
    by_data: bool = False
    """Whether the plan follows from the length of data, which may be those of a test."""
    unit: Unit | None
    """What it is called once for; None where neither fits."""
    window: int
    """Micro-batches for each step of its optimizer."""
    curve: Curve
    horizon: int | None
    """The call at which the schedule ends: the last before it raises, the last that changes a rate, or the lowest point
    of one that falls to a hundredth and rises again, other than by design."""
    settings: dict[str, int]
    sizes: tuple[Sized, ...]
    """It in the runs of two and of three windows; the first of these is what ``curve`` is of."""
    accumulated: Sized | None = None
    """It in a run with the knob accumulate at 4."""
    plan: Counts = Counts(None, None, None)
    """The declared plan."""
    planned: int | None = None
    """Calls in that plan, where it tells them."""
    plan_accumulated: Counts = Counts(None, None, None)

    @property
    def by_trainer(self) -> bool:
        """Whether the trainer of a library built it for its own training."""
        return not self.sizes

    def falls(self, call: int, to: float = 0.5) -> bool:
        """Whether the highest rate has fallen to this part of its peak, or less, after so many calls."""
        group = self.curve.leading
        return self.curve.raises_at is not None or self.curve.lr(call)[group] <= to * max(self.curve.group(group))

    @property
    def raises_at(self) -> int | None:
        return self.curve.raises_at

    @property
    def message(self) -> str:
        return self.curve.message

    def lr(self, call: int) -> LearningRates:
        """The rate of each group after so many calls."""
        return self.curve.lr(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """The schedules of one loop; to be asked for by ``evidence.shared(Projections.of)``."""

    schedulers: tuple[Projected, ...] = ()
    why: str = ""
    """What could not be projected, and why; empty where all could."""
    alone: dict[int, Curve] = field(default_factory=dict)
    """By the index of an optimizer whose rates a line writes as well: where the calls of its scheduler alone go."""

    @classmethod
    def of(cls, evidence: Evidence) -> Projections:
        """Project the schedules of a loop that can be run again. Raises ``CannotDecide`` for one that cannot."""
        if not evidence.repeatable:
            raise CannotDecide("a schedule is projected on a fresh loop: return a TrainLoop from a marked test")
        if planned := _by_trainer(evidence):
            return cls(schedulers=tuple(planned))
        record = evidence.run()
        if not record.of(SchedulerStep) and not record.schedulers:
            return cls()
        window = _window(record)
        if window > LONGEST_WINDOW:
            return cls(why=f"a step takes {window} batches, too many to see what the schedule is sized by")
        first = ShortRun(evidence, window, SIZES[0], AHEAD)
        if not first.driven:
            return cls(why="no scheduler was called over two steps")
        through = first.ended or any(d.raised for d in first.driven)
        short = through and max(d.steps for d in first.driven) * SIZES[1] <= MOST_ROUNDS * SIZES[0]
        second = ShortRun(evidence, window, SIZES[1], FEW_AHEAD) if short and first.may_be_its_own_plan() else None
        accumulating = "accumulate" in evidence.knobs and short and window == 1
        ahead = max([FEW_AHEAD, *(s.horizon or 0 for s in map(first.sized, first.driven))])
        third = ShortRun(evidence, ACCUMULATE, SIZES[0], ahead, accumulate=ACCUMULATE) if accumulating else None

        def few(driven: Driven) -> bool:
            """Whether the longer watched run calls it no more often than once per epoch."""
            calls = [e for e in record.of(SchedulerStep) if e.optimizer == driven.optimizer]
            return len(calls) <= (len(first.record.passes) + 1) * len(driven.kinds)

        found, undecided = [], []
        for number, driven in enumerate(first.driven):
            if (curve := driven.curve) is None:
                undecided.append(f"{driven.kind}: {driven.why}")
            else:
                runs = [run for run in (first, second) if run]
                found.append(_projected(driven, curve, runs, third, number, few_calls=few(driven)))
        alone = {driven.optimizer: driven.alone for driven in first.driven if driven.alone is not None}
        return cls(schedulers=tuple(found), why="; ".join(undecided), alone=alone)


def horizon(curve: Curve, kind: str) -> int | None:
    if curve.raises_at is not None:
        return curve.raises_at - 1
    settled = curve.settles
    if settled is not None or any(name in kind for name in CYCLIC):
        return settled
    return turns_at(curve)


def turns_at(curve: Curve) -> int | None:
    """The call at which the highest rate has fallen to a hundredth of its peak or less, and rises again from there."""
    group = curve.leading
    lrs, low = curve.group(group), curve.lowest_at(group)
    lowest, peak = lrs[curve.calls.index(low)], max(lrs)
    rises = max(curve.group_since(group, low)) > max(2 * lowest, peak / 50)
    return low if lowest <= peak / 100 and rises else None


class ShortRun:
    """One run of a few batches under the eyes of ``Schedules``."""

    def __init__(self, evidence: Evidence, window: int, windows: int, ahead: int, **knobs: Any) -> None:
        self.window, self.windows, self._least = window, windows, ahead
        self.declared = Counts(None, None, None)
        self.by_data = self.by_trainer = False
        self.schedules = Schedules(self._ahead)
        try:
            self.record = evidence.rerun(
                evidence.plan(**knobs),
                count=windows * window,
                read_ahead=None,
                enough=lambda record: False,
                most_rounds=MOST_ROUNDS,
                around=self.schedules.around,
                contexts=self.schedules.contexts,
                fit=self._noting,
                may_raise=True,
            )
        except (UsageError, UserCodeError) as error:  # so few batches, or the knob, may be too little for the loop
            raise CannotDecide(f"the schedule is not projected: over {windows * window} batches, {error}") from None
        self.driven = self.schedules.driven
        self.ended = self.record.ended

    def _noting(self, loop: Any) -> Callable[[Any], Any]:
        steps = None if loop.steps is None else int(loop.steps)
        epochs = None if loop.epochs is None else int(loop.epochs)
        self.by_trainer = hasattr(loop.fit, "planned_schedules")
        if steps is None and epochs is not None and (batches := _length(loop.batches)):
            steps, self.by_data = max(1, batches * epochs // self.window), True
        self.declared = Counts(steps, None if steps is None else steps * self.window, epochs)
        return fit_of(loop)

    def _ahead(self, schedules: Schedules) -> int:
        return max(self._least, 5 * (self.declared.micro_batches or 0) // 2, 5 * (self.declared.passes or 0) // 2)

    def may_be_its_own_plan(self) -> bool:
        """Whether a schedule is made inside ``fit``, or ends with one of the counts of this run."""
        for driven in self.driven:
            size = self.sized(driven)
            known = (size.counts.steps, size.counts.micro_batches, size.counts.passes)
            if driven.curve and (driven.made_in_fit or size.horizon in known):
                return True
        return False

    def sized(self, driven: Driven) -> Sized:
        record, items = self.record, self.windows * self.window
        passes: int | None = len(record.passes)
        micro_batches = record.items
        if passes == 1 and record.items == items and driven.steps > self.windows and driven.steps % self.windows == 0:
            passes = driven.steps // self.windows  # over a list that the loop has made of its batches
            micro_batches = passes * items
        return Sized(
            counts=Counts(driven.steps, micro_batches, passes),
            calls=driven.calls,
            curve=driven.curve,
            horizon=horizon(driven.curve, driven.kind) if driven.curve else None,
            windows=self.windows,
            ended=self.ended,
            raised=driven.raised,
        )


def _length(batches: Any) -> int | None:
    """The batches of a loader in one pass, also of one that Accelerate has prepared; None where they have no length."""
    if not hasattr(batches, "dataset"):
        return None
    try:
        return len(batches)
    except TypeError:  # of an iterable data set
        return None


def _window(record: Record) -> int:
    """Batches for each step."""
    if not record.rounds:
        return 1
    return max(1, round(record.items / record.rounds))


def _projected(
    driven: Driven,
    curve: Curve,
    runs: Sequence[ShortRun],
    accumulated: ShortRun | None,
    number: int,
    *,
    few_calls: bool,
) -> Projected:
    sizes = tuple(run.sized(run.driven[number]) for run in runs if len(run.driven) > number)
    unit = unit_of(sizes)
    if unit == "epoch" and not few_calls:
        unit = None
    window = runs[0].window
    found = Projected(
        kind=driven.kind,
        optimizer=driven.optimizer,
        made_in_fit=driven.made_in_fit,
        place=driven.place,
        made_at=str(driven.made_at or ""),
        made_at_line=("", 0) if driven.made_at is None else (driven.made_at.file, driven.made_at.line),
        unit=unit,
        window=window,
        curve=curve,
        horizon=sizes[0].horizon,
        settings=dict(driven.settings),
        sizes=sizes,
        plan=runs[0].declared,
        by_data=runs[0].by_trainer or (unit != "epoch" and runs[0].by_data),
        planned=None if unit is None else runs[0].declared.of(unit),
    )
    if accumulated is None or len(accumulated.driven) <= number:
        return found
    return replace(
        found,
        accumulated=accumulated.sized(accumulated.driven[number]),
        plan_accumulated=accumulated.declared,
    )


def unit_of(sizes: Sequence[Sized]) -> Unit | None:
    """What a scheduler is called once for in all of these runs: exactly, else but for one call.

    A run that ends by itself in the middle of a pass, or before its last call, has one call less.
    """
    units: tuple[Unit, ...] = ("step", "micro-batch", "epoch")
    for off in (0, 1):
        for unit in units:
            if all((n := s.counts.of(unit)) is not None and abs(n - s.calls) <= off for s in sizes):
                return unit
    return None


def _by_trainer(evidence: Evidence) -> list[Projected]:
    """Schedules as the trainer of a library builds them for its own data and length."""
    with preserved():
        loop = evidence.fresh_loop()
        make = getattr(loop.fit, "planned_schedules", None)
        if make is None:
            return []
        try:
            planned: Sequence[Planned] = make()
        except Exception as error:  # of a trainer without data, or whose code needs more: its runs show less
            reraise_ours(error)
            return []
        return [_of_trainer(one) for one in planned]


def _of_trainer(one: Planned) -> Projected:
    curve = Curve(calls=[0], lrs=[lrs_of(one.optimizer)])
    project(one.schedulers, one.optimizer, curve, max(AHEAD, 5 * one.calls // 2))
    kind = " and ".join(type(s).__name__ for s in one.schedulers)
    return Projected(
        kind=kind,
        optimizer=0,
        made_in_fit=True,
        place=one.place,
        made_at=one.place,
        by_data=not one.declared,
        unit=one.unit,
        window=1,
        curve=curve,
        horizon=horizon(curve, kind),
        settings={},
        sizes=(),
        plan=one.counts,
        planned=one.calls,
    )
