"""Schedulers whose settings, or whose argument, contradict what they are for."""

from __future__ import annotations

import ast
import itertools
import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import FEWEST, calls_of, line_of
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.records.learning_rates import rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import SchedulerStep
    from pytest_trainloop.recording.record import Record, Scheduler

FRACTIONS = ("CosineAnnealingWarmRestarts",)
"""Schedulers that are documented to be called with a fraction of an epoch."""


def plateau_mode(record: Record) -> Iterator[Finding]:
    """``mode="max"`` with the loss that is minimized as the metric."""
    for scheduler in record.schedulers:
        calls = [c for c in calls_of(record, scheduler.number) if not math.isnan(c.value)]
        if not scheduler.plateau or scheduler.settings.get("mode") != "'max'" or len(calls) < 2:
            continue
        if any(o.maximizes for o in record.optimizers) or not all(_is_last_root(record, c) for c in calls):
            continue
        yield Finding(
            cause="plateau_mode",
            summary=(
                'ReduceLROnPlateau(mode="max") is given the training loss: it lowers the rate where the loss falls'
            ),
            measured=f"the metric begins {_first(calls)} in {len(calls)} calls",
            shown_by="at every call the metric is the value of the last loss that backward() was called on",
            culprits=("mode",),
            kinds=("attribute",),
            where=str(calls[0].place),
            change=line_of(scheduler),
        )


def plateau_metric(record: Record) -> Iterator[Finding]:
    """A metric that is always the first loss, while the loss moves on."""
    for scheduler in record.schedulers:
        calls = [c for c in calls_of(record, scheduler.number) if not math.isnan(c.value)]
        if not scheduler.plateau or len(calls) < FEWEST or len({c.value for c in calls}) != 1:
            continue
        roots = [_last_roots(record, c) for c in calls]
        if len({tuple(r) for r in roots}) < len(calls) or not any(_near(calls[0].value, v) for v in roots[0]):
            continue
        yield Finding(
            cause="plateau_metric_stands_still",
            summary=f"ReduceLROnPlateau is given the first loss, {calls[0].value:.4g}, at all {len(calls)} calls",
            measured=f"the loss itself goes from {roots[0][-1]:.4g} to {roots[-1][-1]:.4g} meanwhile",
            shown_by="the metric equals the loss that backward() was called on before the first call, to 1e-6",
            culprits=("ReduceLROnPlateau.step()",),
            where=str(calls[1].place),
        )


def metric_as_epoch(record: Record) -> Iterator[Finding]:
    """A loss given to a scheduler that takes it for the number of the epoch."""
    for scheduler in record.schedulers:
        calls = [c for c in calls_of(record, scheduler.number) if not math.isnan(c.value)]
        if scheduler.plateau or len(calls) < 2 or any(c.value == int(c.value) for c in calls if math.isfinite(c.value)):
            continue
        losses = all(_is_last_root(record, c) for c in calls)
        falls = any(b.value < a.value for a, b in itertools.pairwise(calls)) and scheduler.kind not in FRACTIONS
        if not losses and not falls:
            continue
        yield Finding(
            cause="metric_as_epoch",
            summary=f"{scheduler.kind}.step() is given a metric, and takes it for the number of the epoch",
            measured=f"the argument begins {_first(calls)} in {len(calls)} calls",
            shown_by=(
                "at every call that is the value of the last loss that backward() was called on"
                if losses
                else "fractions that rise and fall are no epochs"
            ),
            culprits=(f"{scheduler.kind}.step()",),
            where=str(calls[0].place),
        )


def shared_variable(record: Record) -> Iterator[Finding]:
    """A list of lambdas, one for each group, made in a loop whose variable they all read: each sees its last value."""
    for scheduler in record.schedulers:
        groups = [r for r in rates(record) if r.optimizer == scheduler.optimizer]
        if not scheduler.shares or not scheduler.calls:
            continue
        name = scheduler.shares[0]
        yield Finding(
            cause="lambdas_share_a_variable",
            summary=f"the lambdas of {len(groups)} groups all read the last value of {name}: they are one and the same",
            measured=f"{scheduler.kind} multiplies the rate of each group by the same factor",
            shown_by=f"the functions have one code, and their variable {name}, which a loop sets, is one and the same",
            culprits=(name,),
            kinds=("attribute",),
            where=line_of(scheduler),
            change=scheduler.function or line_of(scheduler),
            repair=f"lambda step, {name}={name}: ...",
        )


def bounds(record: Record) -> Iterator[Finding]:
    """Schedules that are to lower the rate and end above where it begins, or may not lower it at all."""
    for scheduler in record.schedulers:
        if scheduler.optimizer is None or not scheduler.calls:
            continue
        base = _base(record, scheduler)
        key = "eta_min" if scheduler.kind.startswith("CosineAnnealing") else "min_lrs" if scheduler.plateau else ""
        least = _numbers(scheduler.settings.get(key, ""))
        if not base or not least or not any(base):
            continue
        if not all(low > rate for low, rate in zip(least * len(base), base, strict=False)):
            continue
        what = (
            f"eta_min={least[0]:g} lies above the rate {max(base):g}: the schedule raises it"
            if key == "eta_min"
            else f"min_lr={least[0]:g} lies above the rate {max(base):g}: it is never lowered"
        )
        yield Finding(
            cause="bound_above_rate",
            summary=f"{scheduler.kind}: {what}",
            measured=f"{key.removesuffix('s')} {least[0]:g}, rates of the groups at the first step {base[0]:g}",
            shown_by=(
                f"{scheduler.kind} moves the rate towards eta_min, from wherever it begins"
                if key == "eta_min"
                else f"{scheduler.kind} sets no rate below min_lr, and leaves those that already are"
            ),
            culprits=(key.removesuffix("s"),),
            kinds=("attribute",),
            where=str(calls_of(record, scheduler.number)[0].place) if calls_of(record, scheduler.number) else "",
            change=line_of(scheduler),
        )


def _first(calls: Sequence[SchedulerStep]) -> str:
    shown = ", ".join(f"{c.value:.4g}" for c in calls[:4])
    return f"{shown}, ..." if len(calls) > 4 else shown


def _base(record: Record, scheduler: Scheduler) -> list[float]:
    """The rate that each group began with."""
    given = _numbers(scheduler.settings.get("base_lrs", ""))
    return given or [r.known[0] for r in rates(record) if r.optimizer == scheduler.optimizer and r.known]


def _numbers(text: str) -> list[float]:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return []
    values = value if isinstance(value, list) else [value]
    return [float(v) for v in values if isinstance(v, (int, float))]


def _is_last_root(record: Record, call: SchedulerStep) -> bool:
    return any(_near(call.value, value) for value in _last_roots(record, call))


def _last_roots(record: Record, call: SchedulerStep) -> Sequence[float]:
    last = next((b for b in reversed(record.of(Backward)) if b.at < call.at), None)
    return [] if last is None else [root.value for root in last.roots]


def _near(one: float, other: float) -> bool:
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) <= 1e-6 * max(abs(one), abs(other))
