"""Values of a record that are not finite: weights before and after training, losses, gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.gradients.vectors import values
from pytest_trainloop.recording.events import Backward, GradWrite, LossCall, Step

if TYPE_CHECKING:
    from pytest_trainloop.recording.events import Fact
    from pytest_trainloop.recording.record import Parameter, Record

LEAST = 3
"""Backward passes from losses that are not finite before a loop is said never to train."""

GROWTH = 100.0
"""Factor between the first gradient and the last finite one from which gradients explode: ordinary ones stay within a
few times the first."""


@dataclass(frozen=True, slots=True)
class Explosion:
    """The parameter whose gradients grew most, the optimizer step since which they did, and their peaks by step."""

    name: str
    since: int
    peaks: tuple[float, ...]


def bad_from_the_start(record: Record) -> list[Parameter]:
    """Parameters that train, or are NaN, before the first step, and that nothing initialises later on."""
    return [
        p
        for p in record.parameters
        if p.role != "foreign"
        and not _finite(p.start, p.dtype)
        and not _finite(record.end.get(p.index), p.dtype)
        and (p.trainable or math.isnan(p.start.peak))
    ]


def ruined(record: Record) -> list[Parameter]:
    """Parameters that were finite before training and are not after it. An infinity that somebody writes by hand (a
    choice that is ruled out) is meant."""
    by_hand = record.moved_outside_steps()
    return [
        p
        for p in record.parameters
        if _finite(p.start, p.dtype)
        and p.start.sample
        and not _finite(record.end.get(p.index), p.dtype)
        and (p.index not in by_hand or bool(values(record.end[p.index], p.dtype).isnan().any()))
    ]


def bad_losses(record: Record) -> int:
    """How many losses that are not finite were backpropagated and stepped on: the gradients that came of them were
    finite, or nothing ever trained."""
    bad = [b for b in record.backwards() if any(not math.isfinite(root.value) for root in b.roots)]
    if len(bad) >= LEAST and len(bad) == len(record.backwards()) and not record.changed():
        return len(bad)
    return sum(_stepped_on(record, b) for b in bad)


def _stepped_on(record: Record, backward: Backward) -> bool:
    arrived = [a.incoming for arrivals in backward.arrivals.values() for a in arrivals]
    finite = bool(arrived) and all(fact.finite for fact in arrived)
    after = next((e for e in record.events if e.at > backward.at and isinstance(e, (Backward, Step))), None)
    return finite and isinstance(after, Step)


def losses_not_finite(record: Record) -> bool:
    """Whether a loss function gave such a value."""
    return any(call.value is not None and not math.isfinite(call.value) for call in record.of(LossCall))


def never_stepped(record: Record) -> bool:
    """Whether a loop that came to its end made no step at all, and no loss function gave it anything finite."""
    losses = [call.value for call in record.of(LossCall) if call.value is not None]
    return record.ended and not record.steps and len(losses) >= LEAST and not any(map(math.isfinite, losses))


def cleaned_gradients(record: Record) -> GradWrite | None:
    """The write that made a gradient finite which had arrived otherwise, and that a step then consumed."""
    arrived = {p.index: list(record.arrivals(p.index)) for p in record.parameters}
    suspects = {i: all_ for i, all_ in arrived.items() if any(not math.isfinite(a.incoming.peak) for a in all_)}
    for step in record.of(Step) if suspects else ():
        for index, grad in (step.reads[-1].grads if step.reads and step.full and not step.nested else {}).items():
            before = [a for a in suspects.get(index, ()) if a.at < step.at]
            clean = grad is not None and bool(grad.sample) and grad.finite
            if not clean or not before or math.isfinite(before[-1].incoming.peak):
                continue  # or a finite one came in after it
            writes = [w for w in record.of(GradWrite) if before[-1].at < w.at < step.at and index in w.parameters]
            if writes and not any(w.how in ("none", "zero") for w in writes):
                return writes[0]
    return None


def explosion(record: Record) -> Explosion | None:
    """How gradients grew before one of them was no longer finite; None where they did not."""
    series: dict[int, list[float]] = {}
    for backward in record.of(Backward):
        for index, arrived in backward.arrivals.items():
            series.setdefault(index, []).append(max(a.incoming.peak for a in arrived))
    found: list[tuple[float, Explosion]] = []
    for index, peaks in series.items():
        last = next((i for i, peak in enumerate(peaks) if not math.isfinite(peak)), len(peaks))
        before = peaks[:last]
        if last >= LEAST and before[0] > 0 and before[-1] > GROWTH * before[0]:
            since = next(i for i, peak in enumerate(before) if peak > GROWTH**0.5 * before[0])
            found.append((before[-1] / before[0], Explosion(record.name(index), since, tuple(before))))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _finite(fact: Fact | None, dtype: str) -> bool:
    """Whether all sampled entries are; also of what has none."""
    return fact is None or not fact.sample or bool(values(fact, dtype).isfinite().all())
