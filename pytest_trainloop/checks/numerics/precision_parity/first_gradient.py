"""The gradient of a run's first window as one vector, and how far another lies from it."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.gradients.vectors import consumed, values, vectors
from pytest_trainloop.recording.events import Backward, GradWrite, ScalerCall, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.gradients.vectors import Gradient
    from pytest_trainloop.recording.record import Record


def first_gradient(record: Record, reference: Record | None = None) -> Gradient:
    """The gradient that arrived at each parameter before any of them moved and that was not zeroed, without a scaler's
    factor; where none arrived and user code assigned gradients, those that the first step read.

    With a reference a pass counts as scaled where its root is larger than there by a factor nearer the scale than 1: a
    loop may leave the scaler out for one of its losses.
    Of a large tensor the sampled entries stand for all: they are weighted by the root of the entries that each stands
    for, so that the length is that of the whole gradient.
    """
    until = first_change(record)
    factors = iter(_factors(record, reference))
    found: Gradient = {}
    for event in record.events:
        if event.at >= until:
            break
        if isinstance(event, GradWrite) and event.how in ("none", "zero"):
            if found and any(m.since < event.at < m.at for m in record.moves):
                break  # an update outside of optimizers read them before it zeroed them
            for index in event.parameters:
                found.pop(record.name(index), None)
        if isinstance(event, Backward) and event.kind == "backward":
            _add(found, record, event, next(factors))
    return found or _assigned(record)


def _factors(record: Record, reference: Record | None) -> Iterator[float]:
    """The scaler's factor on each backward pass."""
    others = [] if reference is None else reference.backwards()
    for backward, other in itertools.zip_longest(record.backwards(), others):
        if backward is not None:
            factor = scale_at(record, backward)
            yield factor if other is None or _carries(factor, backward, other) else 1.0


def _carries(factor: float, backward: Backward, other: Backward) -> bool:
    for root, plain in zip(backward.roots, other.roots, strict=False):
        larger = abs(root.value / plain.value) if plain.value else math.nan
        if 0.0 < larger < math.inf:
            return abs(math.log(larger / factor)) <= abs(math.log(larger))
    return True


def _add(found: Gradient, record: Record, backward: Backward, factor: float) -> None:
    for index, arrivals in backward.arrivals.items():
        p = record.parameters[index]
        for arrival in arrivals:
            if arrival.incoming.raw and not arrival.incoming.sparse:
                weight = _weight(p.shape, len(arrival.incoming.raw), p.dtype) / factor
                entries = values(arrival.incoming, p.dtype) * weight
                found[p.name] = found[p.name] + entries if p.name in found else entries


def first_item(record: Record) -> int:
    """How many batches the loop had taken when it made the last gradient before any parameter moved."""
    until = first_change(record)
    return max((b.item for b in record.backwards() if b.at < until), default=0)


def _assigned(record: Record) -> Gradient:
    stepped = next((s for s in record.of(Step) if not s.nested and s.reads), None)
    return (consumed(record, stepped.optimizer, 0) or {}) if stepped else {}


def first_change(record: Record) -> float:
    """The moment of the first step, made or skipped by a scaler, or of the backward pass that finds weights moved by
    anything but an optimizer."""
    stepped = [float(s.reads[0].at) for s in record.of(Step) if not s.nested and s.reads]
    asked = [float(c.at) for c in record.of(ScalerCall) if c.what == "step"]
    moved = [m.at - 1.0 for m in record.moves]
    return min((*stepped, *asked, *moved), default=math.inf)


def scale_at(record: Record, backward: Backward) -> float:
    """The factor of the scaler that scaled last before this pass; 1 without one."""
    scaled = [c for c in record.of(ScalerCall) if c.what == "scale" and c.enabled and c.at < backward.at]
    return scaled[-1].factor if scaled and 0.0 < scaled[-1].factor < math.inf else 1.0


def first_scale(record: Record) -> float:
    """The factor that a scaler put on what was backpropagated first."""
    backwards = record.backwards()
    return scale_at(record, backwards[0]) if backwards else 1.0


def _weight(shape: tuple[int, ...], size: int, dtype: str) -> float:
    width = getattr(torch, dtype).itemsize
    return math.sqrt(max(1.0, math.prod(shape) * width / size))


def distance(reference: Gradient, other: Gradient) -> float:
    """The length of the difference over that of the reference; infinite where the other is not finite."""
    a, b = vectors([reference, other])
    length = float(torch.linalg.vector_norm(a))
    apart = float(torch.linalg.vector_norm(b - a))
    if not math.isfinite(length):
        return math.nan
    if not math.isfinite(apart):
        return math.inf
    return apart / length if length else (0.0 if apart == 0.0 else math.inf)


def finite(gradient: Gradient) -> bool:
    return all(bool(entries.isfinite().all()) for entries in gradient.values())
