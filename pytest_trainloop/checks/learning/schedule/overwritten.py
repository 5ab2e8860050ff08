"""Schedules whose rates no step uses: written over by a line of the loop, or by another scheduler."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import FEWEST, calls_of, line_of, numbers
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import SchedulerStep
from pytest_trainloop.records.learning_rates import rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.record import Record, Scheduler
    from pytest_trainloop.records.learning_rates import GroupRates
    from pytest_trainloop.runs.evidence import Evidence

ABSOLUTE = ("LambdaLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts")
"""Torch's schedulers that compute each rate from the base rate and the number of calls: whatever another scheduler did
in between is lost."""


def overwritten(evidence: Evidence) -> Iterator[Finding]:
    record = evidence.run()
    outer = [s for s in record.schedulers if s.calls and not s.inner and s.optimizer is not None]
    for scheduler in outer:
        if found := _by_hand(evidence, record, scheduler):
            yield found
            continue
        for other in outer:
            if (
                other is not scheduler
                and other.optimizer == scheduler.optimizer
                and _by_other(record, scheduler, other)
            ):
                yield _of_other(record, scheduler, other)
                break


def lost_by_hand(evidence: Evidence) -> Iterator[Finding]:
    """Rates that a line writes and that a scheduler sets anew before any step uses them."""
    record = evidence.run()
    for scheduler in record.schedulers:
        if scheduler.kind not in ABSOLUTE or not scheduler.from_torch or scheduler.optimizer is None:
            continue
        calls = calls_of(record, scheduler.number)
        steps = [s for s in record.innermost_steps() if s.optimizer == scheduler.optimizer]
        lost = []
        for call in calls:
            step = next((s for s in reversed(steps) if s.at < call.at), None)
            others = [o for o in record.of(SchedulerStep) if step and step.at < o.at < call.at]
            if step is not None and not others and call.before and step.lrs[: len(call.before)] != call.before:
                lost.append((step, call))
        if len(lost) < FEWEST or len(lost) < len(calls) - 1 or any(c.before == c.after for _, c in lost):
            continue
        from pytest_trainloop.tracing.rate_writes import RateWrites

        step, call = lost[0]
        line = evidence.shared(RateWrites.of).line(optimizer=scheduler.optimizer)
        yield Finding(
            cause="written_rate_lost",
            summary=(
                f"a line writes {call.before[0]:g} and {scheduler.kind} sets the rate to {call.after[0]:g} before any "
                "step uses it"
            ),
            measured=f"{len(lost)} of {len(calls)} calls find a rate that no step was made with",
            shown_by=f"{scheduler.kind} computes each rate from the base rate, whatever stands there",
            culprits=(f"{scheduler.kind}.step()",),
            where=line or str(call.place),
            change=line,
        )


def _by_hand(evidence: Evidence, record: Record, scheduler: Scheduler) -> Finding | None:
    calls = calls_of(record, scheduler.number)
    groups = [r for r in rates(record) if r.optimizer == scheduler.optimizer]
    moved = [g for g in groups if _is_written_back(evidence, g, calls)]
    if not moved or any(g.moves for g in groups):
        return None
    group = moved[0]
    from pytest_trainloop.tracing.rate_writes import RateWrites

    line = evidence.shared(RateWrites.of).line(optimizer=group.optimizer, group=group.group)
    given = [c.after[group.group] for c in calls if c.before != c.after]
    return Finding(
        cause="schedule_overwritten",
        summary=(
            f"{scheduler.kind} is called and its rates are never used: before each step a line writes "
            f"{group.known[0]:g} back to group {group.group}"
        ),
        measured=(
            f"{len(calls)} calls set it to {numbers(given)}; all {len(group.values)} steps are made at "
            f"{group.known[0]:g}"
        ),
        shown_by="between each call of the scheduler and the next step the rate changes without a scheduler",
        culprits=(f"{scheduler.kind}.step()",),
        where=line or str(calls[0].place),
        change=line,
    )


def _is_written_back(evidence: Evidence, group: GroupRates, calls: Sequence[SchedulerStep]) -> bool:
    """Whether each call moves a group's rate away from the one constant, non-zero rate of all steps.

    A rate that is kept within bounds, ``max(lr, floor)`` in a warm-up, looks alike: what the calls leave then comes
    nearer to the bound, and goes beyond it in a longer run. A schedule that never does is bounded in vain.
    """
    if not group.constant or not group.known[0] or len(group.values) < FEWEST:
        return False
    rate, last = group.known[0], group.at[-1]
    left = [c.after[group.group] for c in calls if c.at < last and group.group < len(c.after)]
    if len(left) < FEWEST or any(value == rate for value in left):
        return False
    nearer = abs(left[-1] - rate) < abs(left[0] - rate)
    return not nearer or _never_beyond(evidence, group, left[0] < rate)


def _never_beyond(evidence: Evidence, group: GroupRates, below: bool) -> bool:
    """Whether the calls of the scheduler alone leave the rate on one side of the group's, or at it, for good."""
    from pytest_trainloop.runs.projection import Projections

    if not evidence.repeatable:
        return False
    try:
        curve = evidence.shared(Projections.of).alone.get(group.optimizer)
    except CannotDecide:
        return False
    if curve is None or group.group >= len(curve.rates[0]):
        return False
    rate, rounding = group.known[0], 1e-9 * group.known[0]
    ahead = curve.group(group.group)
    return max(ahead) <= rate + rounding if below else min(ahead) >= rate - rounding


def _by_other(record: Record, scheduler: Scheduler, other: Scheduler) -> bool:
    """Whether the other one sets the rates anew after each call of this one that moves them."""
    if other.kind not in ABSOLUTE or not other.from_torch or scheduler.kind == other.kind:
        return False
    moved = [c for c in calls_of(record, scheduler.number) if c.before != c.after]
    anew = [c.at for c in calls_of(record, other.number)]
    steps = [s.at for s in record.innermost_steps() if s.optimizer == scheduler.optimizer]
    if len(moved) < FEWEST - 1:
        return False
    return all(_is_undone(c.at, anew, steps) for c in moved if any(at > c.at for at in steps))


def _is_undone(call: int, anew: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether at most one step uses what a call leaves, before the other scheduler is called."""
    following = next((at for at in anew if at > call), None)
    return following is not None and sum(call < at < following for at in steps) <= 1


def _of_other(record: Record, scheduler: Scheduler, other: Scheduler) -> Finding:
    calls = calls_of(record, scheduler.number)
    moved = [c for c in calls if c.before != c.after]
    first = moved[0]
    later = next(c for c in calls_of(record, other.number) if c.at > first.at)
    pairs = itertools.islice(zip(first.before, first.after, strict=False), 1)
    before, after = next(pairs)
    return Finding(
        cause="schedule_overwritten",
        summary=(
            f"{scheduler.kind} is called and its rates are lost: {other.kind} on the same optimizer computes each rate "
            "from the base rate, whatever stands there"
        ),
        measured=(
            f"{len(moved)} calls of {scheduler.kind} move the rate, the first from {before:g} to {after:g}; the next "
            f"call of {other.kind} sets it to {later.after[0]:g}"
        ),
        shown_by=f"each of them is followed by a call of {other.kind} before the second next step",
        culprits=(f"{scheduler.kind}.step()", f"{other.kind}.step()"),
        where=str(later.place),
        change=line_of(scheduler),
        repair=f"SequentialLR for one after the other; to multiply both, one LambdaLR over the product instead of "
        f"{scheduler.kind} and {other.kind}",
    )
