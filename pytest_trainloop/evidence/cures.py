"""Which one change of the settings makes a loop learn that does not: other rates, or rates held at their peak.

Each is tried on a fresh loop, on the same batch, until the loss is halved; the first that helps is the cause, shown by
a run that differs in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.evidence.learning import LEARNED
from pytest_trainloop.evidence.rates import held_at_their_peak, times

if TYPE_CHECKING:
    from pytest_trainloop.evidence.learning import Learning
    from pytest_trainloop.evidence.onebatch import Curve, OneBatch

HIGHER = (10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
LOWER = (0.1, 0.01, 1e-3)

IN_VAIN = 1e4
"""Factor on the rates that changes nothing at all where weights do not move by them."""

DECAYED = 0.01
"""Share of its peak below which a rate has decayed."""


@dataclass(frozen=True, slots=True)
class Cure:
    """What helped: ``factor`` on the rates; how many steps until the loss was halved; ``rates`` from the lowest to the
    highest tried factor that learned."""

    what: Literal["higher", "lower", "held"]
    factor: float
    steps: int
    band: tuple[float, float]


def cure(batch: OneBatch, found: Learning, seconds: float) -> Cure | None:
    """The first change that helps; none is tried any more once all runs that are not the loop's own took so long."""
    rates = [r for r in batch.curve.rates if r == r]
    if rates and rates[-1] < DECAYED * max(rates):
        held = batch.changed("rates held", held_at_their_peak())
        if _learns(held, found):
            return Cure("held", 1.0, held.steps, (max(rates), max(rates)))
    for factor in LOWER if found.too_far else HIGHER:
        if batch.spent > seconds:
            return None
        curve = batch.changed(f"rates times {factor:g}", times(factor))
        if _learns(curve, found):
            top = max(rates, default=float("nan"))
            return Cure(
                "lower" if found.too_far else "higher", factor, curve.steps, _band(batch, found, factor, top, seconds)
            )
        if factor >= IN_VAIN and curve.end == curve.start:
            return None
    return None


def _band(batch: OneBatch, found: Learning, factor: float, rate: float, seconds: float) -> tuple[float, float]:
    """The rates that learn, from the first factor that does on in powers of ten."""
    last, step = factor, 0.1 if found.too_far else 10.0
    for further in (factor * step, factor * step**2):
        if batch.spent > seconds or not _learns(batch.changed(f"rates times {further:g}", times(further)), found):
            break
        last = further
    ends = sorted((factor * rate, last * rate))
    return ends[0], ends[1]


def _learns(curve: Curve, found: Learning) -> bool:
    way = found.start - found.reference
    return curve.halved or (curve.steps > 0 and found.start - curve.end >= LEARNED * way)
