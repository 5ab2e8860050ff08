"""The curve of the whole training: every scheduler stepped forward without training, against the plan.

The plan is ``steps=`` or ``epochs=``; or the training that ``fit`` makes of the batches that it is given. Where a
schedule is made for these batches, or ends with the passes that ``fit`` makes, ``fit`` is its own plan: two runs, over
two windows and over three, show which of their counts a schedule ends with.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.learning.schedule.causes import found
from pytest_trainloop.checks.learning.schedule.learning_rates import held_in, learns
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.core.wording import count, some
from pytest_trainloop.instruments.records.lrs_by_hand import LRsByHand
from pytest_trainloop.instruments.tracing.definitions import length_given
from pytest_trainloop.instruments.tracing.statements import only_return
from pytest_trainloop.runs.projection import CYCLIC, Projections

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.projection import Projected, Sized, Unit

GONE = 0.01
"""Of its peak: a rate this low trains nothing that the rest did not."""

LATE, VANISHED = 0.75, 1.000001e-6
"""The part of a plan after which a rate this small, over its peak, is no end of a decay. Weights of float32 keep 2^-24
of their size: where a step at the peak moves a weight by a twentieth, one at this rate is rounded off."""

LITTLE = 0.1
"""Of its peak: where a schedule ends that is sized by the training."""

LEAST_PASSES, MANY_PASSES, LEAST_END = 3, 8, 8
"""Passes from which on a schedule that ends with as many calls is no coincidence of small numbers: where two runs show
it, and where one does. Calls from which on the quarter of a schedule differs from other small numbers."""

MOST_PASSES = 1000
"""Calls of a schedule that is called once per epoch, above which no known recipe goes (nnU-Net has 1000)."""

UNITS: tuple[Unit, ...] = ("epoch", "step", "micro-batch")

CALLS_IN: dict[Unit | None, str] = {
    "step": "len(loader) * epochs // accumulate calls",
    "micro-batch": "len(loader) * epochs calls",
    "epoch": "epochs calls",
    None: "as many calls as are made",
}

LENGTHS = {
    "CosineAnnealingLR": ("T_max", 1),
    "OneCycleLR": ("total_steps", 2),
    "PolynomialLR": ("total_iters", 1),
    "get_linear_schedule_with_warmup": ("num_training_steps", 2),
    "get_cosine_schedule_with_warmup": ("num_training_steps", 2),
    "get_polynomial_decay_schedule_with_warmup": ("num_training_steps", 2),
    "get_scheduler": ("num_training_steps", 3),
}
"""The parameter that is the number of calls of the whole training, by name and position."""


def planned(evidence: Evidence) -> Iterator[Finding]:
    """Faults and advice on the length of every schedule. Raises ``CannotDecide`` where only the plan is missing, or
    where nothing could be projected."""
    record, projections = evidence.run(), evidence.shared(Projections.of)
    undecided = [projections.why] if projections.why else []
    said: set[tuple[str, str]] = set()
    for one in (*projections.schedulers, *evidence.shared(LRsByHand.of).projected):
        rules = [_of_shape(record, one), _of_another_unit(one), _of_plan(record, one)]
        if by_scheduler := one in projections.schedulers:
            rules[1:1] = [_of_fit(one)]
            rules[3:3] = [_of_windows(one)]
            rules.append(_of_names(one))
        findings = next((made for rule in rules if (made := list(rule))), [])  # the first rule that finds something
        yield from (f for f in findings if (f.cause, f.where) not in said)  # one line may write for two optimizers
        said |= {(f.cause, f.where) for f in findings}
        if one.planned is None and one.horizon and not findings and by_scheduler and not _sized_by_fit(one):
            times = f"once per {one.unit}" if one.unit else "now and then"
            give = f"{'epochs= (epochs' if one.unit == 'epoch' else 'steps= (optimizer steps'} of the real run)"
            known = f"{one.kind}, called {times}, is projected to its end at call {one.horizon}"
            undecided.append(f"{known}; give {give} to have it judged")
    if undecided and not said:
        raise CannotDecide("; ".join(undecided), needs="steps=")


_OF_LENGTH = ("runs_out", "over_too_early", "rises_again", "ends_in_warmup", "barely_begun")
"""Causes that another length of the schedule mends."""


def _finds(one: Projected, cause: str, variant: str = "", **facts: Any) -> Finding:
    culprits = facts.pop("culprits", (one.kind,))
    given = length_given(one.made_at) if cause in _OF_LENGTH else only_return(one.made_at)
    return found(cause, one.place, culprits, variant, **{"change": given or one.made_at, "kind": one.kind, **facts})


def _otherwise(one: Projected, built: Unit | str, numbers: str, why: str, repair: str = "", **facts: Any) -> Finding:
    """Built for the calls of one unit, and called in another."""
    length = built if built not in UNITS else f"one call per {built}"
    repair = repair or f"build it for {CALLS_IN[one.unit]}, or call it once per {built}"
    facts = {"unit": one.unit or "", "more": "", **facts}
    # called too often or too seldom, the call moves; else the length is another one, where it is given
    moves = one.unit == "micro-batch" or (one.unit == "epoch" and built != "epoch")
    facts["change"] = str(one.place) if moves else length_given(one.made_at) or one.made_at
    return _finds(one, "counts_something_else", length=length, numbers=numbers, why=why, repair=repair, **facts)


def _drawn(one: Projected, calls: int, group: int | None = None) -> str:
    """The rate at the start, in the middle and at the end of so many calls, and a picture of all of them; of the group
    with the highest."""
    group = one.curve.leading if group is None else group
    points = [one.curve.lr(round(n * calls / 7))[group] for n in range(8)]
    blocks = "".join("▁▂▃▄▅▆▇█"[round(7 * max(point, 0.0) / (max(points) or 1.0))] for point in points)
    at = {call: one.curve.lr(call)[group] for call in (0, calls // 2, calls)}
    return f"learning rate {blocks} " + ", ".join(f"{lr:.2g} at call {call}" for call, lr in at.items())


def _sized_by_fit(one: Projected) -> bool:
    """Whether the schedule is built for the training that ``fit`` makes, or may be."""
    if one.sizes and all(size.ended and size.horizon == size.calls for size in one.sizes):
        return True
    ends = [size.horizon for size in one.sizes]
    return one.made_in_fit and bool(ends) and (len(ends) == 1 or ends[0] != ends[1])


def _of_shape(record: Record, one: Projected) -> Iterator[Finding]:
    """What is wrong with a curve whatever its length; of most a plan makes advice a fault."""
    curve, calls = one.curve, one.planned
    level = "fault" if calls is not None and not one.by_data and not _sized_by_fit(one) else "advice"
    end = min(calls or one.horizon or curve.end, curve.end)
    group, lrs = curve.leading, curve.group(curve.leading)
    peaks = [max(curve.group(g)) for g in range(len(curve.lrs[0]))]
    peak, cyclic = peaks[group], any(name in one.kind for name in CYCLIC)
    still = next((call for call, lr in enumerate(lrs) if lr != lrs[0]), 0)
    if peak <= 0 or cyclic or end < LEAST_END or curve.calls[: end + 1] != list(range(end + 1)):
        return
    bases: list[float] = []
    if one.optimizer < len(record.optimizers):
        optimizer = record.optimizers[one.optimizer]
        bases = [a if a == a else b for a, b in zip(optimizer.peak_lrs, optimizer.first_lrs, strict=False)]
    facts: dict[str, Any] = {"calls": end, "drawn": _drawn(one, end), "end": end, "last": lrs[end], "first": lrs[0]}
    if form := _multiplied(lrs):
        quotients = ", ".join(f"{b / a:.3g}" for a, b in itertools.pairwise(lrs[:5]))
        facts |= {"part": lrs[end] / lrs[0], "quotients": quotients, "form": form, "rises": "warm-up" in form}
        yield _finds(one, "factors_multiply", **facts)
    elif (
        one.kind == "LambdaLR"
        and still
        and len(bases) == len(peaks)
        and 0 < bases[group] < 1
        and all(bases)
        and any(
            all(math.isclose(b, a * factor, rel_tol=1e-9) for a, b, factor in zip(bases, peaks, factors, strict=True))
            for factors in (bases, [bases[group]] * len(bases))
        )
    ):  # a constant factor may be any number
        yield _finds(one, "lr_is_the_factor", base=bases[group], peak=peak, **facts)
    elif still >= max(LEAST_END, end - 1) and max(lrs[still : end + 1], default=peak) <= GONE**3 * peak:
        # a whole number of parts, as 1 - step // total: the step of a staircase is no end (odd: milestones_in_steps)
        facts |= {"calls": still, "end": still, "last": lrs[still], "level": level, "drawn": _drawn(one, still)}
        yield _finds(one, "never_falls", **facts)
    elif calls and lrs[0] == 0 and group < len(bases) and bases[group] and _is_line([*lrs[:calls], bases[group]]):
        # a range test goes on beyond the base rate, or ends somewhere else (odd: range_test_of_rates)
        yield _finds(one, "never_falls", "rises", level=level, step=lrs[1], **{**facts, "last": bases[group]})
    else:
        yield from _of_one_group(record, one, end, level)
        end = min(end, (one.raises_at or end + 2) - 2)  # OneCycleLR rises once more behind its last call
        dips = [n for n in range(1, end) if 2 * lrs[n] <= min(lrs[n - 1], lrs[n + 1]) > peak / 100]
        if len(dips) == 1 and lrs[dips[0] + 1] <= 2 * lrs[dips[0] - 1]:
            at = dips[0]
            facts |= {"before": lrs[at - 1], "low": lrs[at], "after": lrs[at + 1], "level": level}
            yield _finds(one, "dips_for_one_call", **{**facts, "end": at})


def _multiplied(lrs: list[float]) -> str:
    """What the quotients of successive rates are, where they are themselves a warm-up that ends at 1, or a decay; empty
    where they are not.

    The quotients of a linear decay over n calls are 1 - 1/(n - k): their second difference is 2/n of the first or more,
    which no straight line has.
    """
    quotients = [b / a for a, b in itertools.pairwise(lrs[:2000]) if a > 0 and b >= 0]
    rising = list(itertools.takewhile(lambda quotient: quotient < 1 - 1e-12, quotients))
    after = quotients[len(rising) : len(rising) + 3]
    ends = bool(after) and all(math.isclose(quotient, 1, rel_tol=1e-12) for quotient in after)
    if ends and len(rising) >= 4 and rising[-1] > rising[0] and _is_line([*rising, 1.0]):
        return f"the line of a warm-up from {rising[0]:.3g} to 1"
    head = rising[:12]
    forms = {f"(1 - step / total) ** {power:g}": [q ** (1 / power) for q in head] for power in (1, 0.9, 2, 0.5)}
    forms["a cosine from 1 to 0"] = [math.acos(min(1.0, 2 * q - 1)) for q in head if q >= 0]
    for form, line in forms.items():
        if len(head) >= LEAST_END and _is_line(line) and abs(line[1] - line[0]) > 1e-5 and head[-1] < head[0]:
            return form
    return ""


def _is_line(values: list[float]) -> bool:
    """Whether successive values differ by one number, to a millionth of it."""
    step = (values[-1] - values[0]) / (len(values) - 1)
    return all(abs(b - a - step) <= 1e-6 * abs(step) for a, b in itertools.pairwise(values))


def _of_one_group(record: Record, one: Projected, end: int, level: str) -> Iterator[Finding]:
    """A group whose rate comes to 0 for good at the very call at which the warm-up of another one ends."""
    curve = one.curve
    optimizer = record.optimizers[one.optimizer] if one.optimizer < len(record.optimizers) else None
    for group in range(len(curve.lrs[0])) if optimizer is not None else ():
        lrs = curve.group(group)[: end + 1]
        zero = len(lrs) - len(list(itertools.takewhile(lambda lr: lr == 0, reversed(lrs))))
        # layers that are frozen one after the other (FreezeOut) have no warm-up that ends with it
        other = next((g for g in range(len(curve.lrs[0])) if curve.lr(0)[g] < curve.lr(zero)[g] / 2), None)
        if not 2 <= zero <= end / 2 or other is None or abs(curve.peak_at(other) - zero) > 1 or optimizer is None:
            continue
        names = held_in(record, optimizer, group)
        if learns(record, optimizer, group):
            drawn, others = (_drawn(one, 2 * zero, number) for number in (group, other))
            facts: dict[str, Any] = {
                "group": group,
                "held": some(names),
                "other": other,
                "peak": max(curve.group(other)),
                "end": zero,
            }
            facts |= {"culprits": tuple(names[:8]), "level": level, "drawn": drawn, "others": others}
            yield _finds(one, "group_falls_to_zero", **facts)
            return


def _of_fit(one: Projected) -> Iterator[Finding]:
    """A schedule that is sized in one unit of the run and called in another, or ends with the first pass."""
    ends = [size.horizon for size in one.sizes]
    if not ends or any(end is None for end in ends):
        return
    first, end = one.sizes[0], ends[0] or 0
    ended = all(size.ended for size in one.sizes)
    if len(ends) < 2:  # only the shorter run was short enough: the passes of a longer fit
        passes = one.unit == "step" and end == first.counts.passes and end >= MANY_PASSES
        if ended and passes and first.calls >= 2 * end and one.falls(end, LITTLE):
            numbers = f"in a fit of {count(end, 'epoch')} its last change is at call {end} of {first.calls}"
            why = f"the last change of {one.kind} is at call {end}, and fit ends after {count(end, 'epoch')}"
            yield _otherwise(one, "epoch", numbers, why)
        return
    grows = one.made_in_fit and (ends[1] or 0) > end
    if grows and all(size.raised for size in one.sizes):
        few, more = (f"{size.windows * one.window} batches per epoch call {size.calls + 1}" for size in one.sizes)
        facts: dict[str, Any] = {
            "call": first.calls + 1,
            "sizes": f"with {few} raises; with {more}",
            "message": first.raised[:200],
        }
        yield _finds(one, "runs_out", "of fit", repair=f"build it for {CALLS_IN[one.unit]}", **facts)
        return
    if not ended or one.unit is None:
        return
    for unit in UNITS:
        counts = [size.counts.of(unit) for size in one.sizes]
        if unit == one.unit or counts != ends or counts == [size.calls for size in one.sizes]:
            continue
        passes = unit == "epoch" and end >= LEAST_PASSES
        if one.falls(end, LITTLE) and (passes or (unit != "epoch" and grows)) and first.curve:
            lrs = first.curve.group(one.curve.leading)
            numbers = (
                f"in a fit of {count(end, unit)} its end is at call {end} of {first.calls}: the rate is "
                f"{max(lrs):.2g} at its peak, {_lr(one, first, end):.2g} at call {end} and "
                f"{_lr(one, first, first.calls):.2g} at call {first.calls}"
            )
            yield _otherwise(one, unit, numbers, _both(one, unit))
            return
    passes_made = first.counts.passes or 0
    if not grows or one.unit == "epoch" or passes_made < 2:
        return
    if [(end or 0) * passes_made for end in ends] == [size.calls for size in one.sizes] and first.curve:
        facts = {"passes": passes_made, "end": end, "calls": first.calls, "sizes": _both(one)}
        facts["repair"] = f"build it for {CALLS_IN[one.unit]}"
        rest = first.curve.since(end)[: first.calls - end + 1]
        if first.curve.settles is None:
            yield _finds(one, "rises_again", "first pass", level="advice", **facts)
        elif rest and not any(any(lrs) for lrs in rest):
            yield _finds(one, "over_too_early", "first pass", **facts)


def _lr(one: Projected, size: Sized, call: int) -> float:
    return size.curve.lr(call)[one.curve.leading] if size.curve else 0.0


def _both(one: Projected, unit: Unit | None = None) -> str:
    """Where the schedule ends in the two runs."""
    first, second = one.sizes

    def ends(size: Sized) -> str:
        counted = f" ({count(size.counts.of(unit) or 0, unit)})" if unit else ""
        return f"at call {size.horizon} of {size.calls}{counted}"

    few, more = (size.windows * one.window for size in one.sizes)
    return f"with {few} batches per epoch it ends {ends(first)}; with {more}, {ends(second)}"


def _of_windows(one: Projected) -> Iterator[Finding]:
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
    in_steps = end is not None and before == one.sizes[0].calls and one.made_in_fit
    falls = end is not None and before is not None and one.falls(before)
    if grown.calls == micro_batches:
        shorter = end != before and abs((end or 0) - (before or 0) / window) <= 1 and (before or 0) >= LEAST_END
        if falls and ((in_steps and end == steps) or (shorter and not one.made_in_fit)):
            yield _sized_otherwise(one, grown, window, "step", f"{window} times as fast")
        elif _ends_otherwise(grown, one.plan_accumulated.micro_batches):
            yield _per_micro_batch(one, window, grown)
    elif grown.calls == steps and falls:
        plain, divided = one.plan.steps, one.plan_accumulated.steps
        fits = plain is not None and divided is not None and abs(divided - plain / window) <= 1
        if (in_steps and end == micro_batches) or (fits and end == before and abs((before or 0) - (plain or 0)) <= 1):
            part = {2: "second", 3: "third", 4: "fourth"}.get(window, f"{window}th")
            yield _sized_otherwise(one, grown, window, "micro-batch", f"only to its {part} part")


def _stretched(one: Projected, grown: Sized, window: int) -> bool:
    """Whether the rates of a step are equal with a window and without: the schedule counts in windows itself."""
    if grown.curve is None or grown.calls != grown.counts.micro_batches:
        return False
    calls = range(0, min(20, grown.curve.end // window, one.curve.end))
    same = all(grown.curve.lrs[window * call] == one.curve.lrs[call] for call in calls)
    return same and len({one.curve.lrs[call] for call in calls}) > 1


def _ends_otherwise(size: Sized, planned: int | None) -> bool:
    """Whether nothing shows that the schedule is built for micro-batches as well."""
    end = size.horizon
    if end is None:
        return True
    if planned is not None and 0.5 <= planned / max(end, 1) <= 2:
        return False
    return abs(end - size.calls) > 1


def _sized_otherwise(one: Projected, size: Sized, window: int, unit: Unit, how: str) -> Finding:
    called: Unit = "micro-batch" if unit == "step" else "step"
    numbers = (
        f"its last change is at call {one.sizes[0].horizon} without accumulation and at call {size.horizon} with "
        f"accumulate={window}, for {size.calls} calls in {count(size.counts.steps or 0, 'step')}"
    )
    why = "the length of the schedule and the calls of it change differently with the knob accumulate"
    repair = f"call it once per {unit}, or build it for {CALLS_IN[called]}"
    return _otherwise(one, unit, numbers, why, repair, unit=called, more=f"under accumulate={window} it runs {how}")


def _per_micro_batch(one: Projected, window: int, size: Sized) -> Finding:
    facts: dict[str, Any] = {
        "window": window,
        "calls": size.calls,
        "steps": size.counts.steps or 0,
        "micro": size.counts.micro_batches,
    }
    return _finds(one, "per_micro_batch", level="advice", **{**facts, "change": one.place})


def _of_another_unit(one: Projected) -> Iterator[Finding]:
    """The unit by which the schedule was sized, where that is another than it is called by: its end is that count of
    the plan to one call, and far from the calls of the plan: but for windows of two, in which half is far enough."""
    end, calls = one.horizon, one.planned
    if end is None or calls is None or one.unit is None or end < 3 or not one.falls(end) or _sized_by_fit(one):
        return
    for unit in UNITS:
        counted = one.plan.of(unit)
        far = not 0.5 <= end / calls <= 2 or ("epoch" not in (unit, one.unit) and counted in (2 * calls, calls / 2))
        if unit != one.unit and counted is not None and abs(counted - end) <= 1 and far:
            others = count(counted, unit)
            repair = f"build it for {calls} calls, or call it once per {unit}"
            numbers = f"its end is at call {end} of {calls}; {_drawn(one, calls)}"
            why = f"the training has {others} and {count(calls, one.unit)}"
            length = f"{end} calls, as the training has {others}"
            yield _otherwise(one, length, numbers, why, repair, more=f"{calls} times")
            return


def _of_plan(record: Record, one: Projected) -> Iterator[Finding]:
    """One that follows from the length of data may be that of a test: only what no length of the data would make right
    is a fault then."""
    calls, curve = one.planned, one.curve
    if calls is None or one.unit is None or _sized_by_fit(one):
        return
    if not one.by_data and (zero := list(_zero_throughout(record, one, calls))):
        yield from zero
        return
    group, lrs = curve.leading, curve.group(curve.leading)
    peak, peak_at, last, end = max(lrs), curve.peak_at(group), curve.lr(calls)[group], one.horizon
    facts: dict[str, Any] = {
        "calls": calls,
        "in_all": f"{calls} calls in the whole training, one per {one.unit}",
        "peak": peak,
    }
    facts |= {"drawn": _drawn(one, calls), "last": last, "end": end}
    if one.raises_at is not None and one.raises_at < calls:
        facts |= {"call": one.raises_at, "message": one.message[:250], "level": "advice" if one.by_data else "fault"}
        yield _finds(one, "runs_out", **facts)
        return
    reached, long = max(r[group] for r in curve.until(calls)), peak_at >= 2 * calls
    cyclic = any(name in one.kind for name in CYCLIC)
    grows = lrs[0] > 0 and math.isclose(lrs[1] / lrs[0], lrs[2] / lrs[1]) if len(lrs) > 2 else False
    # no warm-up multiplies the rate at each call (odd: range_test_over_eight_decades)
    if peak_at > calls and reached < peak and (long or not one.by_data) and not (cyclic or grows):
        facts |= {"call": peak_at, "reached": reached, "part": reached / peak}
        yield _finds(one, "ends_in_warmup", level="fault" if long and not one.by_data else "advice", **facts)
        return
    late = curve.lr(round(LATE * calls))[group]
    if 0 < last <= late <= VANISHED * peak and (one.unit != "epoch" or not one.by_data):
        yield _finds(one, "fades_out", part=late / peak, **facts)  # more data make it fade earlier still
        return
    if one.by_data:
        return
    if end is not None and curve.settles == end and end < calls / 2 and last <= GONE * peak:
        nothing = not any(curve.lr(calls))
        yield _finds(one, "over_too_early", level="fault" if nothing else "advice", **facts)
        return
    low = curve.lowest_at(group)
    if end is not None and end == low and curve.settles != end and one.raises_at is None and low < calls - 1:
        again = max(curve.group_between(group, low, calls))
        if curve.lr(low + 1)[group] > 0.9 * peak:
            return  # an immediate restart is intended (odd: hard_restarts)
        if again > max(2 * GONE * peak, 2 * curve.lr(low)[group]):
            # Once more up after the length of one epoch, where the first rise was a short warm-up: no cycle, which
            # would rise as it rose before (odd: cycles_through_the_training).
            passes, warm = one.plan.passes or 1, curve.lrs[0][group] < peak / 2
            epoch = passes > 1 and one.unit == "step" and abs(low * passes - calls) <= passes
            slower = curve.lr(low + peak_at)[group] < 0.9 * peak
            level = "fault" if warm and epoch and slower else "advice"
            yield _finds(one, "rises_again", level=level, part=again / peak, **facts)
            return
    lowest = min(curve.group_since(group, peak_at))
    if low >= 2 * calls and last > peak / 2 and lowest <= GONE * peak and end is not None:
        yield _finds(one, "barely_begun", level="advice", part=last / peak, **{**facts, "end": low})


def _zero_throughout(record: Record, one: Projected, calls: int) -> Iterator[Finding]:
    """Groups that never have a rate in the whole training and get gradients, while other groups have one."""
    through = one.curve.until(calls)
    if one.optimizer >= len(record.optimizers) or not any(any(lrs) for lrs in through):
        return
    optimizer = record.optimizers[one.optimizer]
    for group in range(len(through[0])):
        reached = {record.name(i) for i in optimizer.parameters if record.reached(i)}
        names = [n for n in held_in(record, optimizer, group) if n in reached and not record.declared_frozen(n)]
        if names and not any(lrs[group] for lrs in through):
            later = (c for c, r in zip(one.curve.calls, one.curve.lrs, strict=True) if r[group] > 0)
            facts: dict[str, Any] = {"group": group, "held": some(names), "calls": calls, "rises": next(later, 0)}
            yield _finds(
                one, "group_at_zero", "planned", culprits=tuple(names), peak=max(max(r) for r in through), **facts
            )


def _of_names(one: Projected) -> Iterator[Finding]:
    """A schedule whose own arguments name another unit than it is called by; advice but where they contradict."""
    per_pass, passes = one.settings.get("steps_per_epoch", 1), one.settings.get("epochs", 0)
    text = _length_text(one.made_at_line, one.kind)
    made = count(one.sizes[0].counts.passes or 0, "epoch") if one.sizes else ""
    numbers = f"{one.sizes[0].calls} calls in {made}" if one.sizes else ""
    if one.unit == "epoch" and per_pass > 1 and passes:
        why, repair = (
            "the number of calls does not grow with the batches of an epoch",
            "call it after each optimizer.step()",
        )
        more = f"{passes} epochs make {passes} of its {passes * per_pass} calls"
        numbers = f"steps_per_epoch={per_pass}, epochs={passes}; {numbers}"
        yield _otherwise(one, f"{per_pass} steps per epoch", numbers, why, repair, more=more)
    elif one.planned is not None:
        return
    elif one.unit == "step" and "epochs" in text and not re.search(r"steps?|iters?|len\(|batch|\*|loader|per_", text):
        why = "the number of calls grows with the batches of an epoch"
        repair = "call it once per epoch, or build it for len(loader) * epochs calls"
        yield _otherwise(one, f"{text} calls, which names epochs", numbers, why, repair, level="advice")
    elif one.unit == "epoch" and not one.made_in_fit and one.horizon is not None:
        steps = "len(" in text or re.search(r"steps|iters", text)
        if (steps or not text) and (text or one.horizon > MOST_PASSES):
            repair = "call it after each optimizer.step(), or build it for as many calls as there are epochs"
            at = f"its last change is at call {one.horizon}"
            yield _otherwise(one, f"{text or one.horizon} calls", at, numbers, repair, level="advice")


def _length_text(place: tuple[str, int], kind: str) -> str:
    """The expression that is given as the number of calls where a scheduler is built; empty where it is not known."""
    file, line = place
    for node in ast.walk(syntax_of(file)):
        if not isinstance(node, ast.Call) or not node.lineno <= line <= (node.end_lineno or line):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in LENGTHS or (name[0].isupper() and name != kind):
            continue
        keyword, position = LENGTHS[name]
        given = next((k.value for k in node.keywords if k.arg == keyword), None)
        if given is None and len(node.args) > position:
            given = node.args[position]
        return "" if given is None or isinstance(given, ast.Constant) else ast.unparse(given)
    return ""
