"""Length of a schedule against the training that ``fit`` makes of the batches that it is given.

Where the schedule is made for these batches, or ends with the passes that ``fit`` makes, ``fit`` is its own plan. Two
runs, over two windows and over three, show which of their counts a schedule ends with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.plan_text import plan_finding
from pytest_trainloop.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.projection import Projected, Sized, Unit

LEAST_PASSES = 3
"""Passes from which on a schedule that ends with as many calls is no coincidence of small numbers."""

MANY_PASSES = 8
"""The same where only one run shows it."""

LEAST_END = 8
"""Calls from which on the quarter of a schedule can be told from other small numbers."""

LITTLE = 0.1
"""Of its peak: where a schedule ends that is sized by the training."""


def of_fit(one: Projected) -> Iterator[Finding]:
    """A schedule that is sized in one unit of the run and called in another, or ends with the first pass."""
    ends = [size.horizon for size in one.sizes]
    if any(end is None for end in ends):
        return
    if len(ends) < 2:
        yield from _of_many_passes(one)
        return
    grows = one.made_in_fit and ends[1] > ends[0]  # type: ignore[operator]
    if grows and all(size.raised for size in one.sizes):
        yield _runs_out(one)
        return
    if not all(size.ended for size in one.sizes) or one.unit is None:
        return
    units: tuple[Unit, ...] = ("pass", "step", "micro-batch")
    for unit in units:
        counts = [size.counts.of(unit) for size in one.sizes]
        if unit == one.unit or counts != ends or counts == [size.calls for size in one.sizes]:
            continue
        passes = unit == "pass" and (counts[0] or 0) >= LEAST_PASSES
        if one.falls(ends[0] or 0, LITTLE) and (passes or (unit != "pass" and grows)):
            yield _other_unit(one, unit)
            return
    if grows and one.unit != "pass":
        yield from _first_pass_only(one, ends)


def _of_many_passes(one: Projected) -> Iterator[Finding]:
    """The same where only the shorter run was short enough: a schedule that ends with the passes of a longer fit."""
    (size,) = one.sizes or (None,)
    if size is None or not size.ended or one.unit != "step" or size.horizon != size.counts.passes:
        return
    end = size.horizon or 0
    if end >= MANY_PASSES and size.calls >= 2 * end and one.falls(end, LITTLE):
        yield plan_finding(
            one,
            "counts_something_else",
            f"{one.kind} is built for as many calls as fit makes passes, and is called once a step",
            f"in a fit of {count(end, 'pass')} its last change is at call {end}, and it is called {size.calls} times",
            f"the last change of {one.kind} is at call {end}, and fit ends after {count(end, 'pass')}",
            repair=f"build it for {_calls_in(one.unit)}, or call it once a pass",
        )


def _other_unit(one: Projected, unit: Unit) -> Finding:
    first, second = one.sizes
    end = first.horizon or 0
    return plan_finding(
        one,
        "counts_something_else",
        f"{one.kind} is built for as many calls as fit makes {count(2, unit)[2:]}, and is called once a {one.unit}",
        f"in a fit of {count(end, unit)} its end is at call {end} of {first.calls}: the rate is "
        f"{_peak(first, one):.2g} at its peak, {_rate_at(first, one, end):.2g} at call {end} and "
        f"{_rate_at(first, one, first.calls):.2g} at call {first.calls}",
        f"with {_batches(one, first)} batches a pass it ends at call {end} of {first.calls} "
        f"({count(first.counts.of(unit) or 0, unit)}); with {_batches(one, second)}, at call {second.horizon} of "
        f"{second.calls} ({count(second.counts.of(unit) or 0, unit)})",
        repair=f"build it for {_calls_in(one.unit)}, or call it once a {unit}",
    )


def _calls_in(unit: Unit | None) -> str:
    return {
        "step": "len(loader) * epochs // accumulate calls",
        "micro-batch": "len(loader) * epochs calls",
        "pass": "epochs calls",
        None: "as many calls as are made",
    }[unit]


def _batches(one: Projected, size: Sized) -> int:
    return size.windows * one.window


def _rate_at(size: Sized, one: Projected, call: int) -> float:
    return size.curve.rate(call)[one.curve.leading] if size.curve else 0.0


def _peak(size: Sized, one: Projected) -> float:
    return max(size.curve.group(one.curve.leading)) if size.curve else 0.0


def _first_pass_only(one: Projected, ends: Sequence[int | None]) -> Iterator[Finding]:
    """A schedule that is built for one of several passes, and leaves no rate for the others."""
    first = one.sizes[0]
    passes = first.counts.passes or 0
    if passes < 2 or [end and end * passes for end in ends] != [size.calls for size in one.sizes]:
        return
    if first.horizon is not None and first.curve is not None and first.curve.settles is None:
        yield plan_finding(
            one,
            "rises_again",
            f"{one.kind} is built for one pass of the {passes} that fit makes: its rate rises again in the next",
            f"its lowest point is at call {ends[0]} of {first.calls}",
            f"with {_batches(one, first)} batches a pass it is at call {ends[0]} of {first.calls}; with "
            f"{_batches(one, one.sizes[1])}, at call {ends[1]} of {one.sizes[1].calls}",
            level="advice",
            repair=f"build it for {_calls_in(one.unit)}",
        )
        return
    rest = [] if first.curve is None else first.curve.since(ends[0] or 0)[: first.calls - (ends[0] or 0) + 1]
    if rest and not any(any(rates) for rates in rest):
        yield plan_finding(
            one,
            "over_too_early",
            f"{one.kind} is built for one pass of the {passes} that fit makes: in all others the learning rate is 0",
            f"its last change is at call {ends[0]} of {first.calls}",
            f"with {_batches(one, first)} batches a pass it ends at call {ends[0]} of {first.calls}; with "
            f"{_batches(one, one.sizes[1])}, at call {ends[1]} of {one.sizes[1].calls}",
            repair=f"build it for {_calls_in(one.unit)}",
        )


def _runs_out(one: Projected) -> Finding:
    first, second = one.sizes
    return plan_finding(
        one,
        "runs_out",
        f"{one.kind} is built inside fit for fewer calls than fit makes: call {first.calls + 1} raises",
        f"with {_batches(one, first)} batches a pass call {first.calls + 1} raises; with {_batches(one, second)}, call "
        f"{second.calls + 1}",
        f"{first.raised}"[:200],
        repair=f"build it for {_calls_in(one.unit)}",
    )


def of_windows(one: Projected) -> Iterator[Finding]:
    """A scheduler that is called once a micro-batch, or built for as many calls, unlike its optimizer."""
    if one.accumulated is None:
        if one.unit == "micro-batch" and one.window > 1 and _ends_otherwise(one.sizes[0], one.planned):
            yield _per_micro_batch(one, one.window, one.sizes[0])
        return
    grown = one.accumulated
    steps, micro_batches = grown.counts.steps, grown.counts.micro_batches
    window = (micro_batches or 0) // (steps or 1)
    if not steps or not micro_batches or window * steps != micro_batches or window < 2 or not one.sizes:
        return
    end, before = grown.horizon, one.sizes[0].horizon
    if _stretched(one, grown, window):
        return
    in_steps = before == one.sizes[0].calls and one.made_in_fit if end is not None else False
    if grown.calls == micro_batches:
        quarter = (
            end is not None
            and before is not None
            and before >= LEAST_END
            and before != end
            and abs(end - before / window) <= 1
        )
        if one.falls(before or 0) and ((in_steps and end == steps) or (quarter and not one.made_in_fit)):
            yield _sized_otherwise(one, grown, window, before or 0, end or 0, "step")
        elif _ends_otherwise(grown, one.plan_accumulated.micro_batches):
            yield _per_micro_batch(one, window, grown)
    elif grown.calls == steps and end is not None and before is not None and one.falls(before):
        plans = (one.plan.steps, one.plan_accumulated.steps)
        divided = plans[0] is not None and plans[1] is not None and abs(plans[1] - plans[0] / window) <= 1
        planned = divided and end == before and abs(before - (plans[0] or 0)) <= 1
        if (in_steps and end == micro_batches) or planned:
            yield _sized_otherwise(one, grown, window, before, end, "micro-batch")


def _stretched(one: Projected, grown: Sized, window: int) -> bool:
    """Whether the rates of a step are the same with a window and without: the schedule counts in windows itself."""
    if grown.curve is None or grown.calls != grown.counts.micro_batches:
        return False
    calls = range(0, min(20, grown.curve.end // window, one.curve.end))
    same = all(grown.curve.rates[window * call] == one.curve.rates[call] for call in calls)
    return same and len({one.curve.rates[call] for call in calls}) > 1


def _ends_otherwise(size: Sized, planned: int | None) -> bool:
    """Whether nothing shows that the schedule is built for micro-batches as well."""
    end = size.horizon
    if end is None:
        return True
    if planned is not None and 0.5 <= planned / max(end, 1) <= 2:
        return False
    return abs(end - size.calls) > 1


def _sized_otherwise(one: Projected, size: Sized, window: int, before: int, end: int, unit: Unit) -> Finding:
    called: Unit = "micro-batch" if unit == "step" else "step"
    how = f"{window} times as fast" if unit == "step" else f"only to its {_part(window)} part"
    return plan_finding(
        one,
        "counts_something_else",
        f"{one.kind} is built for as many calls as there are {count(2, unit)[2:]}, and is called once a {called}: "
        f"under accumulate={window} it runs {how}",
        f"its last change is at call {before} without accumulation and at call {end} with accumulate={window}, for "
        f"{size.calls} calls in {count(size.counts.steps or 0, 'step')}",
        "the length of the schedule and the calls of it do not change alike with the knob accumulate",
        repair=f"call it once a {unit}, or build it for {_calls_in(called)}",
    )


def _part(window: int) -> str:
    return {2: "second", 3: "third", 4: "fourth"}.get(window, f"{window}th")


def _per_micro_batch(one: Projected, window: int, size: Sized) -> Finding:
    return plan_finding(
        one,
        "per_micro_batch",
        f"{one.kind} is called {window} times for each step of its optimizer, once a micro-batch",
        f"{size.calls} calls for {count(size.counts.steps or 0, 'step')}",
        f"the scheduler is called for each of {size.counts.micro_batches} micro-batches, the optimizer for every "
        f"{window} of them",
        level="advice",
        repair="call it right after optimizer.step(), in the same branch",
        change=one.place,
    )
