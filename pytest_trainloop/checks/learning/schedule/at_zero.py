"""Rates that are 0 for good while the steps go on: a schedule that begins anew at 0, or whose factor is 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import FEWEST, calls_of, line_of
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import SchedulerStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import Step
    from pytest_trainloop.recording.record import Record, Scheduler

FACTORS = ("gamma", "factor")
"""What torch's schedulers call the number that a rate is multiplied by."""

ONWARD = (
    "StepLR",
    "MultiStepLR",
    "ExponentialLR",
    "ConstantLR",
    "LinearLR",
    "PolynomialLR",
    "CosineAnnealingLR",
    "MultiplicativeLR",
)
"""Torch's schedulers that compute each rate from the last one."""


def base_rate_zero(record: Record) -> Iterator[Finding]:
    """Schedulers that are built where every rate has come to 0, and never leave it.

    Rates that a line writes later show at the steps that follow, and end it.
    """
    for scheduler in record.schedulers:
        if not scheduler.at or not _keeps_zero(scheduler):
            continue
        steps = _steps(record, scheduler)
        before, after = [s for s in steps if s.at < scheduler.at], [s for s in steps if s.at > scheduler.at]
        calls = calls_of(record, scheduler.number)
        if not any(any(s.lrs) for s in before) or len(after) < FEWEST or len(calls) < FEWEST - 1:
            continue
        if any(any(s.lrs) for s in after) or any(_rates_before(record, scheduler)):
            continue
        peak = max(max(s.lrs) for s in before)
        yield Finding(
            cause="base_rate_zero",
            summary=(
                f"a new {scheduler.kind} is built where the learning rate has come to 0, and goes on from there: all "
                f"{len(after)} steps since are made at 0"
            ),
            measured=f"{len(before)} steps with rates of up to {peak:g}, then {len(after)} steps at 0",
            shown_by=f"{scheduler.kind} computes each rate from the one that it finds, and finds 0",
            culprits=(scheduler.kind,),
            where=line_of(scheduler) or str(calls[0].place),
            change=line_of(scheduler),
        )
        return


def _keeps_zero(scheduler: Scheduler) -> bool:
    if not scheduler.from_torch or scheduler.inner or scheduler.optimizer is None:
        return False
    bases = scheduler.settings.get("base_lrs", "")
    return scheduler.kind in ONWARD or (scheduler.kind == "LambdaLR" and bool(bases) and set(bases) <= set("[]0., "))


def _steps(record: Record, scheduler: Scheduler) -> list[Step]:
    return [s for s in record.innermost_steps() if s.optimizer == scheduler.optimizer and s.lrs]


def _rates_before(record: Record, scheduler: Scheduler) -> Sequence[float]:
    """The rates that a step or a call left last before the scheduler was built."""
    known = [(s.at, s.lrs) for s in _steps(record, scheduler)]
    known += [(c.at, c.after) for c in record.of(SchedulerStep) if c.optimizer == scheduler.optimizer and c.until]
    return max((one for one in known if one[0] < scheduler.at), default=(0, ()))[1]


def factor_zero(record: Record) -> Iterator[Finding]:
    """A factor of 0 that sets every rate of the only optimizer to 0 from above half of its peak, for good.

    Beside an optimizer that goes on it may be meant: to stop one of the two.
    """
    if sum(bool(o.steps) for o in record.optimizers) != 1:
        return
    for scheduler in record.schedulers:
        name = next((f for f in FACTORS if scheduler.settings.get(f) in ("0", "0.0")), "")
        steps = _steps(record, scheduler)
        call = next((c for c in calls_of(record, scheduler.number) if any(c.before) and not any(c.after)), None)
        if not name or not scheduler.from_torch or call is None:
            continue
        before, after = [s for s in steps if s.at < call.at], [s for s in steps if s.at > call.at]
        peak = max((max(s.lrs) for s in before), default=0.0)
        if len(after) < FEWEST or any(any(s.lrs) for s in after) or max(call.before) <= peak / 2:
            continue
        yield Finding(
            cause="factor_zero",
            summary=(
                f"{scheduler.kind} has {name}=0: from its call after step {len(before)} on the learning rate is 0 for "
                f"good, and {len(after)} more steps are made"
            ),
            measured=f"the rate goes from {max(call.before):g} to 0 in one call; {len(after)} steps at 0 follow",
            shown_by=f"each later rate is the last one times {name}, or 0",
            culprits=(scheduler.kind, name),
            where=str(call.place),
            change=line_of(scheduler),
        )
