"""Which one change of the settings makes a loop learn that does not: other rates, or rates held at their peak.

Each is tried on a fresh loop, on the same batch, until the loss is halved; the first that helps is the cause, shown by
a run that differs in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.outcome import LEARNED
from pytest_trainloop.runs.optimizer_options import (
    LARGE_EPS,
    lr_held_at_peak,
    lr_times,
    with_usual_eps,
    without_weight_decay,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.learning.one_batch import Curve, OneBatch
    from pytest_trainloop.checks.learning.outcome import Learning

HIGHER = (10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
LOWER = (0.1, 0.01, 1e-3)

WORTH = 3e-4
"""Updates relative to the weights below which no factor on the rates is tried: right loops have 1e-4 to 1e-2."""

IN_VAIN = 1e4
"""Factor on the rates that changes nothing at all where weights do not move by them."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What helped: ``factor`` on the rates; after how many steps the batch was learned; the ``band`` of rates that were
    tried and learn."""

    factor: float
    steps: int
    band: tuple[float, float]


def higher(batch: OneBatch, found: Learning) -> Remedy | None:
    """The first higher rates that learn the batch."""
    worth = [factor for factor in HIGHER if factor * found.ratio >= WORTH] if found.ratio > 0 else HIGHER
    return _first(batch, found, worth)


def lower(batch: OneBatch, found: Learning) -> Remedy | None:
    """The same of lower rates."""
    return _first(batch, found, LOWER)


def held(batch: OneBatch, found: Learning) -> Curve | None:
    """The run with rates held at their peak, if it learns."""
    curve = batch.changed("rates held", lr_held_at_peak())
    return curve if _learns(curve, found) else None


def undecayed(batch: OneBatch, found: Learning) -> Curve | None:
    """The run without weight decay, if there is some and it learns without."""
    if not any(decay > 0 for o in batch.seen.optimizers for decay in o.weight_decays):
        return None
    curve = batch.changed("no decay", without_weight_decay)
    return curve if _learns(curve, found) else None


def usual_eps(batch: OneBatch, found: Learning) -> tuple[float, int] | None:
    """The largest eps, if it is a large one, and the steps after which the batch is learned with a usual one in its
    place, if it is."""
    largest = max((eps for o in batch.seen.optimizers for eps in o.eps), default=0.0)
    if largest <= LARGE_EPS:
        return None
    curve = batch.changed("usual eps", with_usual_eps)
    return (largest, curve.steps) if _learns(curve, found) else None


def _first(batch: OneBatch, found: Learning, factors: Sequence[float]) -> Remedy | None:
    for number, factor in enumerate(factors):
        curve = _times(batch, factor)
        if _learns(curve, found):
            last = factor
            for further in factors[number + 1 : number + 3]:
                if not _learns(_times(batch, further), found):
                    break
                last = further
            low, high = sorted((factor * found.peak, last * found.peak))
            return Remedy(factor, curve.steps, (low, high))
        if factor >= IN_VAIN and curve.end == curve.start:
            return None
    return None


def _times(batch: OneBatch, factor: float) -> Curve:
    return batch.changed(f"rates times {factor:g}", lr_times(factor))


def _learns(curve: Curve, found: Learning) -> bool:
    way = found.start - found.reference
    return curve.halved or (curve.steps > 0 and found.start - curve.end >= LEARNED * way)
