"""Where a scaler's calls stand among backward passes and steps. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import GradWrite, ScalerCall, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Backward
    from pytest_trainloop.recording.record import Record


@dataclass(frozen=True, slots=True)
class UpdateBetween:
    """A step through a scaler that was updated since the backward passes that made the gradients."""

    step: ScalerCall
    update: ScalerCall
    optimizer: int
    nth: int
    """Steps of the optimizer before it."""
    unscaled: ScalerCall | None
    """The call that unscaled the gradients before the update."""


def updates_between(record: Record) -> Iterator[UpdateBetween]:
    """Steps through a scaler that was updated since all backward passes that made their gradients."""
    calls = record.scaler_calls()
    for call in calls:
        if call.what != "step" or call.optimizer is None or not call.enabled:
            continue
        mine = [c for c in calls if c.scaler == call.scaler and c.at < call.at]
        update = next((c for c in reversed(mine) if c.what == "update"), None)
        passes = _live(record, call.optimizer, call.at)
        made = next((s for s in record.of(Step) if call.at < s.at < call.until and not s.nested), None)
        if update is None or made is None or not passes or passes[-1].at > update.at:
            continue
        nth = sum(1 for s in record.of(Step) if s.optimizer == made.optimizer and not s.nested and s.at < made.at)
        before = [c for c in mine if c.what == "unscale" and c.optimizer == call.optimizer and c.at > passes[-1].at]
        unscaled = before[-1] if before and before[-1].at < update.at else None
        yield UpdateBetween(call, update, made.optimizer, nth, unscaled)


def unscaled_early(record: Record, optimizer: int) -> tuple[ScalerCall, Backward] | None:
    """The first unscale_ of an optimizer's gradients that is followed by another backward pass before their step."""
    for call in record.scaler_calls():
        if call.what != "unscale" or call.optimizer != optimizer or not call.enabled:
            continue
        step = next((s.at for s in record.of(Step) if s.optimizer == optimizer and s.at > call.at), None)
        if step is None:
            continue
        passes = _live(record, optimizer, step)
        later = next((b for b in passes if b.at > call.at), None)
        if later is not None and passes[0].at < call.at:
            return call, later
    return None


def through_scaler(record: Record, optimizer: int) -> ScalerCall | None:
    """The scaler's call inside which the optimizer made its first step, or None where it was stepped directly."""
    first, steps = first_step(record, optimizer), [c for c in record.scaler_calls() if c.what == "step"]
    return next((c for c in steps if first is not None and c.at < first.at < c.until), None)


def first_step(record: Record, optimizer: int) -> Step | None:
    return next((s for s in record.innermost_steps() if s.optimizer == optimizer), None)


def unscaled_at(record: Record, optimizer: int) -> int:
    """The moment at which the gradients of the optimizer's first step were unscaled; 0 if that was inside the step."""
    first, calls = first_step(record, optimizer), record.scaler_calls()
    unscaled = [c.at for c in calls if c.what == "unscale" and c.optimizer == optimizer and first and c.at < first.at]
    return unscaled[-1] if unscaled else 0


def altered_before(record: Record, optimizer: int, until: int) -> GradWrite | None:
    """A write in place to the gradients of an optimizer's first step, before they are unscaled."""
    held = set(record.optimizers[optimizer].parameters)
    passes = _live(record, optimizer, until)
    writes = [w for w in record.of(GradWrite) if w.how in ("altered", "clipped") and held & set(w.parameters)]
    return next((w for w in writes if passes and passes[0].at < w.at < until), None)


def backwards_for(record: Record, optimizer: int) -> list[Backward]:
    """The backward passes whose gradients the optimizer's first step read."""
    first = first_step(record, optimizer)
    return _live(record, optimizer, first.at) if first is not None else []


def _live(record: Record, optimizer: int, until: int) -> list[Backward]:
    """The backward passes that an optimizer's gradients hold at a moment: neither zeroed nor stepped on."""
    held = set(record.optimizers[optimizer].parameters)
    since = 0
    for event in record.events:
        if event.at >= until:
            break
        zeroed = isinstance(event, GradWrite) and event.how in ("none", "zero") and held & set(event.parameters)
        stepped = isinstance(event, Step) and event.optimizer == optimizer and not event.nested
        if zeroed or stepped:
            since = event.at
    return [b for b in record.backwards() if since < b.at < until and held & set(b.arrivals)]
