"""A scaler's calls in an order in which they cannot do their work, and the scale over a run. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.numerics.grad_scaler.causes import found
from pytest_trainloop.instruments.records.clips import clips_by_site, late
from pytest_trainloop.recording.events import Backward, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.records.gradient_ledger import Ledger
    from pytest_trainloop.recording.events import GradWrite, Place, ScalerCall
    from pytest_trainloop.recording.record import Record


def at(event: Any) -> str:
    return f"{event.place.file}:{event.place.line}"


def call_order(ledger: Ledger) -> Iterator[Finding]:
    """Faults that the order of the calls, or torch's own refusal, shows."""
    yield from clip_before_unscale(ledger)
    yield from update_missing(ledger.record)
    calls, raised = ledger.record.scaler_calls(), ledger.record.raised
    if not calls or raised is None:
        return
    message = raised.message
    facts: dict[str, Any] = {"raised": raised.summary}
    last, before = calls[-1], [c for c in calls[:-1] if c.scaler == calls[-1].scaler]
    if "unscale_() has already been called" in message or "unscale_() is being called after" in message:
        mine = [c for c in before if c.optimizer == last.optimizer and c.what in ("step", "unscale")]
        never_updated = not any(c.what == "update" for c in calls if c.scaler == last.scaler)
        if mine and not (never_updated and _is_other_iteration(ledger.record, mine[-1], last)):
            first = next((c for c in mine if c.what == "step" and c.at < mine[-1].at < c.until), mine[-1])
            between = any(first.at < b.at < last.at for b in ledger.record.of(Backward))
            repair = (
                "unscale once, after the last backward pass of the window; call scaler.update() in every iteration "
                "that unscales, also in one that makes no step"
            )
            variant = "after step" if first.what == "step" else ""
            facts |= {"first": at(first), "then": at(last), "between": between, "repair": repair if between else ""}
            yield found("unscaled_twice", last, ("scaler.unscale_(optimizer)",), variant, **facts)
    if last.what == "update" and "No inf checks were recorded prior to update" in message:
        inside = [c for c in calls if any(d.what == "step" and d.at < c.at < d.until for d in calls)]
        updates = [c for c in before if c.what == "update" and c not in inside]
        if updates:  # without, there was never a step at all: step_order
            between = any(c.what == "scale" and c.at > updates[-1].at for c in before)
            facts |= {"first": at(updates[-1]), "then": at(last), "between": between}
            yield found("update_twice", last, ("scaler.update()",), **facts)
    if "_scale is None" in message and not any(c.what == "scale" for c in calls):
        call, passes = "unscale_" if last.what == "unscale" else last.what, ledger.passes
        where = passes[-1].backward if passes else last
        yield found("not_scaled", where, ("scaler.scale(loss)",), "refused", call=call, passes=len(passes), **facts)


def clip_before_unscale(ledger: Ledger) -> Iterator[Finding]:
    """Clips of gradients that still carry the loss scale, by line, where that happens in two steps or more."""
    record = ledger.record
    for clips in clips_by_site(record):
        scaled = [(c, *carried) for c in clips if (carried := _carried(ledger, c)) is not None]
        if len(scaled) < 2 or late(ledger, clips):
            continue
        clip, scale, carrying = scaled[0]
        partial = set(clip.parameters) & set(record.held) > carrying
        names = record.names(carrying) if partial else ()
        yield found(
            "clip_before_unscale",
            clip,
            (clip.by.lstrip("_"), *names),
            "partial" if partial else "",
            level="fault" if scale.enabled else "advice",
            enabled=scale.enabled,
            known=scale.enabled and math.isfinite(scale.factor),
            scale=f"{scale.factor:g}",
            limit="unknown" if clip.limit is None else f"{clip.limit:g}",
            steps=len(scaled),
            carrying=names,
            holders=" and ".join(sorted({record.optimizers[o].kind for i in carrying for o in record.held[i]})),
        )


def _carried(ledger: Ledger, clip: GradWrite) -> tuple[ScalerCall, set[int]] | None:
    """The call that scaled the loss, and the tensors whose gradients still carry its factor at the clip: they arrived
    after it, and were neither unscaled since (each optimizer for itself) nor written by user code."""
    everything = range(len(ledger.record.parameters))
    scales = [e.event for e in ledger.between(-1, clip.at, everything, "scaled")]
    if not scales:
        return None
    carrying = set()
    for i in set(clip.parameters) & set(ledger.record.held):
        last = ledger.before(clip.at, {i}, "arrived", "unscaled", "assigned", "altered")
        if last is not None and last.what == "arrived" and last.at > scales[0].at:
            carrying.add(i)
    factor = scales[-1].factor
    # a limit that was multiplied by the scale too: limits from 0.01 up are in use, scales begin at 2**10
    is_scaled = clip.limit is not None and math.isfinite(factor) and clip.limit >= 0.01 * factor > 1
    return (scales[-1], carrying) if carrying and not is_scaled else None


def update_missing(record: Record) -> Iterator[Finding]:
    """Scalers that step, or unscale for a step that user code makes, again and again and are never updated."""
    every = record.scaler_calls()
    for scaler in sorted({c.scaler for c in every}):
        calls = [c for c in every if c.scaler == scaler]
        if any(c.what == "update" for c in calls):
            continue
        steps, last, raised = [c for c in calls if c.what == "step"], calls[-1], record.raised
        refused = raised is not None and last is every[-1]
        refused &= raised is not None and any(
            words in raised.message for words in ("since the last update()", "called after step()")
        )
        if refused:
            same = [c for c in calls[:-1] if c.what in ("step", "unscale") and c.optimizer == last.optimizer]
            again = [c for c in same if _is_other_iteration(record, c, last)]
        else:
            again = [c for c in steps if sum(d.optimizer == c.optimizer for d in steps) > 1]
        if again:
            facts: dict[str, Any] = {"call": "step" if steps else "unscale_", "steps": len(steps)}
            facts |= {"raised": raised.summary} if raised is not None else {}
            if not steps:
                facts["change"] = record.step_line()
                facts["repair"] = (
                    "call scaler.update() once at the end of each iteration that steps, and scaler.step(optimizer) in "
                    "place of optimizer.step()"
                )
            facts["level"] = "fault" if again[0].enabled else "advice"
            variant = "refused" if refused else ""
            yield found("update_missing", (steps or again)[-1], ("scaler.update()",), variant, **facts)


def _is_other_iteration(record: Record, first: ScalerCall, last: ScalerCall) -> bool:
    """Whether the two belong to two iterations: a step was made, and another backward pass came."""
    stepped = first.what == "step" or any(first.at < s.at < last.at for s in record.of(Step))
    return stepped and (last.what == "step" or any(first.at < b.at < last.at for b in record.of(Backward)))


@dataclass(frozen=True, slots=True)
class ScaleTrace:
    """The attempted steps of one scaler, in order: the scale at each, and whether the optimizer made it."""

    factors: tuple[float, ...]
    made: tuple[bool, ...]
    place: Place

    @property
    def skipped(self) -> int:
        return self.made.count(False)

    @property
    def first_made(self) -> int:
        """Attempts before the first step that was made."""
        return self.made.index(True) if True in self.made else len(self.made)

    @property
    def skipped_since(self) -> int:
        """Steps skipped after the first one that was made."""
        return self.made[self.first_made :].count(False)

    @property
    def fall(self) -> float:
        """The scale at the first step that was made (or attempted) over that at the last, in powers of two."""
        start = self.factors[self.first_made if True in self.made else 0]
        known = start > 0 and math.isfinite(start) and math.isfinite(self.factors[-1])
        return math.log2(start / max(self.factors[-1], 2.0**-126)) if known else 0.0

    def __str__(self) -> str:
        changes = [_power(f) for i, f in enumerate(self.factors) if i == 0 or f != self.factors[i - 1]]
        shown = changes if len(changes) <= 8 else [*changes[:4], "...", *changes[-4:]]
        return f"scale {' -> '.join(shown)}, {self.skipped} of {len(self.made)} steps skipped"


def _power(factor: float) -> str:
    """A scale as a number where it reads well, else as a power of two."""
    if factor > 0 and math.isfinite(factor) and math.log2(factor).is_integer() and not 1 <= factor <= 2**16:
        return f"2^{int(math.log2(factor))}"
    return f"{factor:g}"


def traces(record: Record) -> list[ScaleTrace]:
    """The trace of every enabled scaler with steps of which it is known whether they were made."""
    scale: dict[int, float] = {}
    tries: dict[int, list[tuple[float, ScalerCall]]] = {}
    for call in record.scaler_calls():
        if call.enabled and call.what == "scale":
            scale[call.scaler] = call.factor
        elif call.enabled and call.what == "step" and call.stepped is not None:
            tries.setdefault(call.scaler, []).append((scale.get(call.scaler, math.nan), call))
    return [
        ScaleTrace(tuple(f for f, _ in tried), tuple(bool(c.stepped) for _, c in tried), tried[0][1].place)
        for tried in tries.values()
    ]


def joined(record: Record) -> ScaleTrace | None:
    """Where each scaler attempts one step and is then replaced: their traces, as one."""
    every = traces(record)
    if len(every) < 3 or any(len(t.made) > 1 for t in every):
        return None
    return ScaleTrace(tuple(t.factors[0] for t in every), tuple(t.made[0] for t in every), every[0].place)
