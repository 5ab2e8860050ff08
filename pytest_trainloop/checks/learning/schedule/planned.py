"""Length of a schedule against the declared plan of the training, and against the one that ``fit`` itself makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.plan_fit import of_fit, of_windows
from pytest_trainloop.checks.learning.schedule.plan_named import named_after_another
from pytest_trainloop.checks.learning.schedule.plan_text import plan_finding, rates_text
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.runs.projection import CYCLIC, Projections
from pytest_trainloop.wording import count, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.projection import Projected, Unit

GONE = 0.01
"""Of its peak: a rate this low trains nothing that the rest did not."""


def planned(evidence: Evidence) -> Iterator[Finding]:
    """Faults and advice on the length of every schedule. Raises ``CannotDecide`` where only the plan is missing, or
    where nothing could be projected."""
    projections = evidence.shared(Projections.of)
    undecided = [projections.why] if projections.why else []
    found = False
    for one in projections.schedulers:
        findings = list(of_schedule(evidence.run(), one))
        found = found or bool(findings)
        yield from findings
        if one.planned is None and one.horizon and not findings and not _sized_by_fit(one):
            undecided.append(_without_plan(one))
    if undecided and not found:
        raise CannotDecide("; ".join(undecided), needs="steps=")


def of_schedule(record: Record, one: Projected) -> Iterator[Finding]:
    """What is wrong with one schedule: the first of these that is found."""
    for judged in (of_fit(one), _of_other_unit(one), of_windows(one), _of_plan(record, one), named_after_another(one)):
        if findings := list(judged):
            yield from findings
            return


def _sized_by_fit(one: Projected) -> bool:
    """Whether the schedule is built for the training that ``fit`` makes, or may be."""
    if one.sizes and all(size.ended and size.horizon == size.calls for size in one.sizes):
        return True
    if not one.made_in_fit or not one.sizes:
        return False
    ends = [size.horizon for size in one.sizes]
    return len(ends) == 1 or ends[0] != ends[1]


def _without_plan(one: Projected) -> str:
    times = {None: "now and then", "step": "once a step", "micro-batch": "once a micro-batch", "pass": "once a pass"}
    give = "epochs= (passes of the real run)" if one.unit == "pass" else "steps= (optimizer steps of the real run)"
    known = f"{one.kind}, called {times[one.unit]}, is projected to its end at call {one.horizon}"
    return f"{known}; give {give} to have it judged"


def _of_plan(record: Record, one: Projected) -> Iterator[Finding]:
    """Against the declared plan. One that follows from the length of data may be that of a test: only what no length of
    the data would make right is a fault then."""
    if one.planned is None or one.unit is None or _sized_by_fit(one):
        return
    zero = [] if one.by_data else list(_zero(record, one, one.planned))
    yield from zero or _length(one, one.planned)


def _other_unit(one: Projected) -> Unit | None:
    """The unit by which the schedule was sized, where that is another than it is called by: its end is that count of
    the plan to one call, and far from the calls of the plan: but for windows of two, in which half is far enough."""
    end, calls = one.horizon, one.planned
    if end is None or calls is None or end < 3 or not one.falls(end):
        return None
    units: tuple[Unit, ...] = ("pass", "step", "micro-batch")
    for unit in units:
        count = one.plan.of(unit)
        far = not 0.5 <= end / calls <= 2 or ("pass" not in (unit, one.unit) and count in (2 * calls, calls / 2))
        if unit != one.unit and count is not None and abs(count - end) <= 1 and far:
            return unit
    return None


def _of_other_unit(one: Projected) -> Iterator[Finding]:
    unit = None if one.unit is None or _sized_by_fit(one) else _other_unit(one)
    if unit is not None:
        others, calls = count(one.plan.of(unit) or 0, unit), count(one.planned or 0, one.unit or "call")
        yield plan_finding(
            one,
            "counts_something_else",
            f"{one.kind} ends after {one.horizon} calls, as the training has {others}, and is called once a "
            f"{one.unit}: {one.planned} times",
            f"its end is at call {one.horizon} of {one.planned}; {rates_text(one, one.planned or 0)}",
            f"the training has {others} and {calls}",
            repair=f"build it for {one.planned} calls, or call it once a {unit}",
        )


def _length(one: Projected, calls: int) -> Iterator[Finding]:
    curve, told = one.curve, f"{calls} calls in the whole training, one a {one.unit}"
    group = curve.leading
    rates = curve.group(group)
    peak, peak_at = max(rates), curve.peak_at(group)
    if one.raises_at is not None and one.raises_at < calls:
        yield plan_finding(
            one,
            "runs_out",
            f"{one.kind} raises at call {one.raises_at}, and the training calls it {calls} times",
            f"call {one.raises_at} of {calls} raises {one.message}"[:300],
            f"stepped forward without training it raises; {told}",
            level="advice" if one.by_data else "fault",
        )
        return
    reached = max(r[group] for r in curve.until(calls))
    last = curve.rate(calls)[group]
    long = peak_at >= 2 * calls
    if (
        peak_at > calls
        and reached < peak
        and (long or not one.by_data)
        and not any(name in one.kind for name in CYCLIC)
    ):
        yield plan_finding(
            one,
            "ends_in_warmup",
            f"the warm-up takes {peak_at} calls, and the whole training has {calls}: it ends at "
            f"{reached / peak:.0%} of the peak",
            f"learning rate {reached:.2g} at the most in the training, {peak:.2g} at call {peak_at}",
            f"stepped forward without training {one.kind} still rises at call {calls}; {told}",
            level="fault" if long and not one.by_data else "advice",
        )
        return
    if not one.by_data:
        yield from _early_or_late(one, calls, peak, last, told)


def _early_or_late(one: Projected, calls: int, peak: float, last: float, told: str) -> Iterator[Finding]:
    curve = one.curve
    group = curve.leading
    end = one.horizon
    if end is not None and curve.settles == end and end < calls / 2 and last <= GONE * peak:
        nothing = all(rate == 0 for rate in curve.rate(calls))
        yield plan_finding(
            one,
            "over_too_early",
            f"{one.kind} is over after {end} of {calls} calls, and the rest of the training has a learning rate of "
            f"{last:.2g}",
            rates_text(one, calls),
            f"stepped forward without training no rate changes after call {end}; {told}",
            level="fault" if nothing else "advice",
        )
        return
    low = curve.lowest_at(group)
    if end is not None and end == low and curve.settles != end and one.raises_at is None and low < calls - 1:
        again = max(curve.group_between(group, low, calls))
        if again > max(2 * GONE * peak, 2 * curve.rate(low)[group]):
            yield plan_finding(
                one,
                "rises_again",
                f"{one.kind} is at its lowest after {low} of {calls} calls, and its rate rises again to "
                f"{again / peak:.0%} of the peak",
                rates_text(one, calls),
                f"stepped forward without training the rate falls until call {low} and rises from there; {told}",
                level="advice",
            )
            return
    lowest = min(curve.group_since(group, curve.peak_at(group)))
    if low >= 2 * calls and last > peak / 2 and lowest <= GONE * peak and end is not None:
        yield plan_finding(
            one,
            "barely_begun",
            f"{one.kind} comes to its lowest point at call {low}, and the training ends at call {calls}, at "
            f"{last / peak:.0%} of the peak",
            rates_text(one, calls),
            f"stepped forward without training the rate falls until call {low}; {told}",
            level="advice",
        )


def _zero(record: Record, one: Projected, calls: int) -> Iterator[Finding]:
    """Groups that never have a rate in the whole training, beside some that do, and get gradients."""
    through = one.curve.until(calls)
    if one.optimizer >= len(record.optimizers):
        return
    optimizer = record.optimizers[one.optimizer]
    for group in range(len(through[0])):
        if any(rates[group] for rates in through) or not any(any(rates) for rates in through):
            continue
        held = [i for i, g in zip(optimizer.parameters, optimizer.groups, strict=True) if g == group]
        names = [record.name(i) for i in held if record.reached(i) and not record.declared_frozen(record.name(i))]
        if names:
            yield plan_finding(
                one,
                "zero_throughout",
                f"the learning rate of group {group} ({some(names)}) is 0 in all {calls} calls of {one.kind}",
                f"0 at every call from 0 to {calls}{_rises(one, group)}; other groups have up to "
                f"{max(max(r) for r in through):.2g}",
                "stepped forward without training no call gives it a rate, and gradients reach its parameters",
                culprits=tuple(names),
            )


def _rises(one: Projected, group: int) -> str:
    """From which call on a group has a rate, if it ever does."""
    first = next((c for c, r in zip(one.curve.calls, one.curve.rates, strict=True) if r[group] > 0), None)
    return "" if first is None else f", and above 0 from call {first} on"
