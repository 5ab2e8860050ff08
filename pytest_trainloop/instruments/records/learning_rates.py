"""The learning rate of every group at every step, who moved it, and how often each scheduler is called."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.recording.events import Backward, SchedulerStep, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.recording.record import Record, Scheduler

Mover = int | Literal["hand"] | None
"""What moved a rate between two steps: the number of a scheduler, a line of the user's, or nothing."""


@dataclass(frozen=True, slots=True)
class GroupLRs:
    """The learning rate of one group at each step of its optimizer, in order."""

    optimizer: int
    group: int
    of: int
    """The groups that the optimizer has."""
    values: tuple[float, ...]
    """NaN at the steps before the group was added, and where its rate is not a number."""
    moved_by: tuple[Mover, ...]
    """What moved the rate since the step before: as many as there are values; None at the first."""
    at: tuple[int, ...]
    """The position of each step in the run."""

    @property
    def known(self) -> tuple[float, ...]:
        return tuple(v for v in self.values if not math.isnan(v))

    @property
    def constant(self) -> bool:
        """Whether the rate is a number, and the same one at every step."""
        return len(set(self.known)) == 1

    @property
    def moves(self) -> bool:
        return len(set(self.known)) > 1

    @property
    def zero(self) -> bool:
        """Whether the rate is 0 at every step."""
        return set(self.known) == {0.0}

    @property
    def movers(self) -> set[int | Literal["hand"]]:
        return {mover for mover in self.moved_by if mover is not None}


def lrs(record: Record) -> list[GroupLRs]:
    """The rates of every group of every optimizer that steps, in the order of optimizers and groups."""
    found = []
    for optimizer in record.optimizers:
        steps = [s for s in record.of(Step) if s.optimizer == optimizer.index and not s.nested and s.lrs]
        count = max((len(s.lrs) for s in steps), default=0)
        calls = [c for c in record.of(SchedulerStep) if c.optimizer == optimizer.index]
        for group in range(count):
            values = tuple(s.lrs[group] if group < len(s.lrs) else math.nan for s in steps)
            movers = _movers(group, steps, calls)
            found.append(GroupLRs(optimizer.index, group, count, values, movers, tuple(s.at for s in steps)))
    return found


def _movers(group: int, steps: Sequence[Step], calls: Sequence[SchedulerStep]) -> tuple[Mover, ...]:
    """Who moved a group's rate before each step: the last of a step's movers counts."""
    known = math.nan
    mover: Mover = None
    movers: list[Mover] = []
    events: list[Step | SchedulerStep] = [*steps, *calls]
    for event in sorted(events, key=lambda e: e.at):
        if isinstance(event, Step):
            lr = event.lrs[group] if group < len(event.lrs) else math.nan
            if _differ(known, lr):
                mover = "hand"
            movers.append(mover)
            mover, known = None, lr
            continue
        if group < len(event.before) and _differ(known, event.before[group]):
            mover, known = "hand", event.before[group]
        if group < len(event.after) and group < len(event.before):
            if _differ(event.before[group], event.after[group]):
                mover = event.number
            known = event.after[group]
    return tuple(movers)


def _differ(one: float, other: float) -> bool:
    return not math.isnan(one) and not math.isnan(other) and one != other


def table(record: Record) -> list[dict[str, Any]]:
    """The rates as plain data for the JSON report: for each optimizer that steps its class and its groups, for each
    group the rate at every step (None where the group was not there yet) and what moved it."""
    kinds = {s.number: s.kind for s in record.schedulers}
    found: dict[int, list[dict[str, Any]]] = {}
    for group in lrs(record):
        movers = sorted({kinds.get(m, "scheduler") if isinstance(m, int) else m for m in group.movers})
        values = [None if math.isnan(v) else v for v in group.values]
        found.setdefault(group.optimizer, []).append({"lr": values, "moved_by": movers})
    return [{"optimizer": record.optimizers[i].kind, "groups": groups} for i, groups in found.items()]


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often a scheduler is called."""

    scheduler: int
    calls: int
    steps: int
    """Steps of its optimizer from its first call on, with those that led to the first call."""
    backwards: int
    """Backward passes of the run until its last call."""
    passes: int
    """Passes over the batches that came to their end."""
    per: Literal["step", "epoch", "micro-batch", "", "once"]
    """What it is called once for: an optimizer step, a backward pass where a step takes several, a pass over the
    batches; "once" where it is called once and more than one of these fits."""

    def __str__(self) -> str:
        if self.per == "once":
            return f"1 call in {self.steps} steps"
        if self.per:
            return f"1 call per {self.per}"
        return f"{self.calls} calls in {self.steps} steps"


def cadence(record: Record) -> dict[int, Cadence]:
    """The cadence of each scheduler that is called, by its number."""
    calls: dict[int, list[SchedulerStep]] = {}
    for call in record.of(SchedulerStep):
        calls.setdefault(call.number, []).append(call)
    return {number: _cadence(record, number, made) for number, made in calls.items()}


def _cadence(record: Record, number: int, calls: Sequence[SchedulerStep]) -> Cadence:
    optimizer, last = calls[-1].optimizer, calls[-1].at
    steps = [s.at for s in record.innermost_steps() if s.optimizer == optimizer]
    backwards = [b for b in record.of(Backward) if b.kind == "backward"]
    before_last = [b for b in backwards if b.at < last]
    ends = list(itertools.accumulate(record.passes))
    items = [max((b.item for b in backwards if b.at < call.at), default=0) for call in calls]
    at_ends = bool(ends) and set(items) <= set(ends) and _once_an_end(items, calls)
    per: Literal["step", "epoch", "micro-batch", "", "once"] = ""
    if len(calls) == 1 and len(steps) > 1:
        per = "once"
    elif at_ends and len(steps) > len(calls):
        per = "epoch"
    elif _one_between(steps, [c.at for c in calls]):
        per = "step"
    elif len(before_last) > len(steps) and _one_between([b.at for b in before_last], [c.at for c in calls]):
        per = "micro-batch"
    return Cadence(number, len(calls), len(steps), len(before_last), sum(end <= record.items for end in ends), per)


def _once_an_end(items: Sequence[int], calls: Sequence[SchedulerStep]) -> bool:
    """Whether each call follows another item, but for those of one line behind the last item: a loop over passes goes
    on where the batches of a run have come to their end."""
    behind = [call.place for item, call in zip(items, calls, strict=True) if item == items[-1]]
    before = [item for item in items if item != items[-1]]
    return len(set(before)) == len(before) and len(set(behind)) == 1


def _one_between(events: Sequence[int], calls: Sequence[int]) -> bool:
    """Whether exactly one event lies between each two calls in a row."""
    counts = [sum(a < at < b for at in events) for a, b in itertools.pairwise(calls)]
    return bool(counts) and set(counts) == {1}


def called(scheduler: Scheduler) -> str:
    """The name of a scheduler in a sentence: "CosineAnnealingLR (train.py:21)"."""
    place = scheduler.place
    return scheduler.kind if place is None else f"{scheduler.kind} ({place.file}:{place.line})"
