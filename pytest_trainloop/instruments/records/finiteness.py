"""Values of a record that are not finite: weights before and after training, losses, gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import Backward, GradWrite, LossCall, Step

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Parameter, Record

LEAST_BACKWARDS = 3
"""Backward passes from losses that are not finite before a loop is said never to train."""

GROWTH = 100.0
"""Factor between the first gradient and the last finite one from which gradients explode: ordinary ones stay within a
few times the first."""


@dataclass(frozen=True, slots=True)
class Explosion:
    """The growth of a gradient until it is no longer finite, of the parameter whose gradient grew most."""

    name: str
    since: int
    """The optimizer step from which it grew."""
    peaks: tuple[float, ...]
    """Its largest entry in each backward pass."""


def nonfinite_from_the_start(record: Record) -> list[Parameter]:
    """Parameters that train, or are NaN, before the first step, and that nothing initialises later on."""
    return [
        p
        for p in record.parameters
        if p.role != "foreign"
        and p.start.nonfinite
        and p.index in record.end
        and record.end[p.index].nonfinite
        and (p.trainable or math.isnan(p.start.peak))
    ]


def became_nonfinite(record: Record) -> list[Parameter]:
    """Parameters that were finite before training and are not after it. An infinity that user code writes outside
    optimizer steps is intended: it rules a choice out."""
    written = record.moved_outside_steps()
    return [
        p
        for p in record.parameters
        if p.start.raw
        and not p.start.nonfinite
        and p.index in record.end
        and record.end[p.index].nonfinite
        and (p.index not in written or record.end[p.index].nonfinite == "nan")
    ]


def stepped_nonfinite_losses(record: Record) -> int:
    """The number of losses that are not finite and after which a step was made: their gradients were finite, or nothing
    ever trained."""
    bad = [b for b in record.backwards() if any(not math.isfinite(root.value) for root in b.roots)]
    if len(bad) >= LEAST_BACKWARDS and len(bad) == len(record.backwards()) and not record.changed():
        return len(bad)
    finite = [b for b in bad if b.arrivals and all(a.incoming.finite for found in b.arrivals.values() for a in found)]
    passes_and_steps = [e for e in record.events if isinstance(e, (Backward, Step))]
    return sum(isinstance(next((e for e in passes_and_steps if e.at > b.at), None), Step) for b in finite)


def nonfinite_losses(record: Record) -> bool:
    """Whether a loss function returned NaN or an infinity."""
    return any(call.value is not None and not math.isfinite(call.value) for call in record.of(LossCall))


def never_stepped(record: Record) -> bool:
    """Whether a loop that came to its end made no step at all, and no loss was finite."""
    losses = [call.value for call in record.of(LossCall) if call.value is not None]
    return record.ended and not record.steps and len(losses) >= LEAST_BACKWARDS and not any(map(math.isfinite, losses))


def cleaned_gradients(record: Record) -> GradWrite | None:
    """The write that replaced a gradient that is not finite by a finite one, which a step then consumed."""
    arrived = {p.index: list(record.arrivals(p.index)) for p in record.parameters}
    suspects = {i: found for i, found in arrived.items() if not all(a.incoming.finite for a in found)}
    for step in record.of(Step) if suspects else ():
        for index, grad in (step.reads[-1].grads if step.reads and step.full and not step.nested else {}).items():
            before = [a for a in suspects.get(index, ()) if a.at < step.at]
            clean = grad is not None and bool(grad.raw) and grad.finite
            if not clean or not before or before[-1].incoming.finite:
                continue  # or a finite one arrived after it
            writes = [w for w in record.of(GradWrite) if before[-1].at < w.at < step.at and index in w.parameters]
            if writes and not any(w.how in ("none", "zero") for w in writes):
                return writes[0]
    return None


def explosion(record: Record) -> Explosion | None:
    """How a gradient grew before it was no longer finite; None where none grew."""
    series: dict[int, list[float]] = {}
    for backward in record.of(Backward):
        for index, arrived in backward.arrivals.items():
            series.setdefault(index, []).append(max(a.incoming.peak for a in arrived))
    found: list[tuple[float, Explosion]] = []
    for index, peaks in series.items():
        last = next((i for i, peak in enumerate(peaks) if not math.isfinite(peak)), len(peaks))
        before = peaks[:last]
        if last >= LEAST_BACKWARDS and before[0] > 0 and before[-1] > GROWTH * before[0]:
            since = next(i for i, peak in enumerate(before) if peak > GROWTH**0.5 * before[0])
            found.append((before[-1] / before[0], Explosion(record.name(index), since, tuple(before))))
    return max(found, key=lambda pair: pair[0])[1] if found else None
