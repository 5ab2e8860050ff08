"""Calls of a gradient scaler in an order in which they cannot do their work. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import Backward, GradWrite, ScalerCall, Step
from pytest_trainloop.records.clips import clips_by_site, comes_after_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record


@dataclass(frozen=True, slots=True)
class ScaledClip:
    """A clip, in several steps, of gradients that still carry the loss scale."""

    clip: GradWrite
    scale: ScalerCall
    carrying: frozenset[int]
    """The parameters whose gradients carry it."""
    partial: bool
    """Whether the clip takes others as well."""
    steps: int


@dataclass(frozen=True, slots=True)
class MissingUpdate:
    """A scaler that steps, or unscales, again without an update."""

    enabled: bool
    steps: int
    refused: bool
    """Whether torch raised."""
    place: Place


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A scaler's call that torch refuses because of an earlier one."""

    earlier: ScalerCall
    refused: ScalerCall
    between: bool
    """Whether another iteration begins between the two: with a backward pass before an unscale_, with a scaled loss
    before an update."""


def scaled_clips(record: Record) -> Iterator[ScaledClip]:
    """By line of the clip, where it happens in two steps or more."""
    for clips in clips_by_site(record):
        late = [c for c in clips if comes_after_step(record, c)]
        if len(late) >= 2 and 2 * len(late) > len(clips):
            continue
        scaled = [(c, *found) for c in clips if (found := _still_scaled(record, c)) is not None]
        scaled = [(c, scale, left) for c, scale, left in scaled if not _scaled_limit(c, scale)]
        if len(scaled) >= 2:
            clip, scale, left = scaled[0]
            yield ScaledClip(clip, scale, left, set(clip.parameters) & set(record.held) > left, len(scaled))


def _still_scaled(record: Record, clip: GradWrite) -> tuple[ScalerCall, frozenset[int]] | None:
    """The call that scaled the loss, and the parameters whose gradients still carry its factor when they are clipped:
    each optimizer is unscaled separately."""
    scale: ScalerCall | None = None
    carrying: set[int] = set()
    for event in record.events:
        if event.at >= clip.at:
            break
        if isinstance(event, ScalerCall) and event.what == "scale":
            scale = event
        elif isinstance(event, ScalerCall) and event.what in ("unscale", "step"):
            carrying -= set(record.optimizers[event.optimizer].parameters) if event.optimizer is not None else carrying
        elif isinstance(event, Backward) and scale is not None:
            carrying |= set(event.arrivals)
        elif isinstance(event, GradWrite) and event.how in ("assigned", "altered"):
            carrying -= set(event.parameters)  # divided by user code, as far as call order can tell
    left = frozenset(carrying & set(clip.parameters) & set(record.held))
    return (scale, left) if scale is not None and left else None


def _scaled_limit(clip: GradWrite, scale: ScalerCall) -> bool:
    """Whether the limit was multiplied by the loss scale too: limits from 0.01 up are in use, scales begin at 2**10."""
    return clip.limit is not None and math.isfinite(scale.factor) and clip.limit >= 0.01 * scale.factor > 1


def missing_updates(record: Record) -> Iterator[MissingUpdate]:
    """Scalers that step, or unscale for a step that user code makes, again and again and are never updated."""
    for scaler in sorted({c.scaler for c in record.scaler_calls()}):
        calls = [c for c in record.scaler_calls() if c.scaler == scaler]
        if any(c.what == "update" for c in calls):
            continue
        steps, last = [c for c in calls if c.what == "step"], calls[-1]
        refused = _refused(record, "since the last update()", "called after step()")
        refused = refused and record.scaler_calls()[-1] is last
        if refused:
            same = [c for c in calls[:-1] if c.what in ("step", "unscale") and c.optimizer == last.optimizer]
            again = [c for c in same if _other_iteration(record, c, last)]
        else:
            again = [c for c in steps if sum(d.optimizer == c.optimizer for d in steps) > 1]
        if again:
            yield MissingUpdate(again[0].enabled, len(steps), refused, (steps or again)[-1].place)


def _other_iteration(record: Record, first: ScalerCall, last: ScalerCall) -> bool:
    """Whether the two belong to two iterations: a step was made, and another backward pass came."""
    stepped = first.what == "step" or any(first.at < s.at < last.at for s in record.of(Step))
    passes = any(first.at < b.at < last.at for b in record.of(Backward))
    return stepped and (passes or last.what == "step")


def _refused(record: Record, *words: str) -> bool:
    return record.raised is not None and any(w in record.raised.message for w in words)


def unscaled_twice(record: Record) -> RefusedCall | None:
    """An unscale_ of gradients that another one, or step(), has unscaled already."""
    calls = record.scaler_calls()
    if not calls or not _refused(record, "unscale_() has already been called", "unscale_() is being called after"):
        return None
    last = calls[-1]
    mine = [c for c in calls[:-1] if (c.scaler, c.optimizer) == (last.scaler, last.optimizer)]
    first = next((c for c in reversed(mine) if c.what in ("step", "unscale")), None)
    updated = any(c.what == "update" and c.scaler == last.scaler for c in calls)
    if first is None or (_other_iteration(record, first, last) and not updated):
        return None
    inside = next((c for c in mine if c.what == "step" and c.at < first.at < c.until), first)
    return RefusedCall(inside, last, any(first.at < b.at < last.at for b in record.of(Backward)))


def updated_twice(record: Record) -> RefusedCall | None:
    """An update with no step or unscale_ since the last one."""
    calls = record.scaler_calls()
    if not calls or calls[-1].what != "update" or not _refused(record, "No inf checks were recorded prior to update"):
        return None
    last = calls[-1]
    inner = [c for c in calls if any(d.what == "step" and d.at < c.at < d.until for d in calls)]  # step() unscales
    mine = [c for c in calls[:-1] if c.scaler == last.scaler and c not in inner]
    before = next((c for c in reversed(mine) if c.what == "update"), None)
    if before is None:
        return None  # never a step at all: step_order
    return RefusedCall(before, last, any(c.what == "scale" and c.at > before.at for c in mine))


def never_scaled(record: Record) -> ScalerCall | None:
    """A step or an unscale_ of a scaler that never scaled a loss."""
    calls = record.scaler_calls()
    if not calls or any(c.what == "scale" for c in calls) or not _refused(record, "_scale is None"):
        return None
    return calls[-1]
