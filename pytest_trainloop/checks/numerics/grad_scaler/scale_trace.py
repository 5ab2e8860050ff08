"""The scale of each scaler over a run, and the steps that it skipped. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.recording.events import Place, ScalerCall
    from pytest_trainloop.recording.record import Record

SHOWN = 4
"""Scales of a trace that are written out at each end."""


@dataclass(frozen=True, slots=True)
class ScaleTrace:
    """The attempted steps of one scaler, in order: the scale at each, and whether the optimizer made it."""

    scaler: int
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
        """The scale's trace, and how many steps were skipped."""
        changes = [f for i, f in enumerate(self.factors) if i == 0 or f != self.factors[i - 1]]
        shown = changes if len(changes) <= 2 * SHOWN else [*changes[:SHOWN], *changes[-SHOWN:]]
        words = [power(f) for f in shown]
        if len(changes) > len(shown):
            words.insert(SHOWN, "...")
        return f"scale {' -> '.join(words)}, {self.skipped} of {len(self.made)} steps skipped"


def power(factor: float) -> str:
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
        ScaleTrace(scaler, tuple(f for f, _ in tried), tuple(bool(c.stepped) for _, c in tried), tried[0][1].place)
        for scaler, tried in tries.items()
    ]


def joined(found: list[ScaleTrace]) -> ScaleTrace:
    """The traces of scalers that replace one another, as one."""
    factors = tuple(f for t in found for f in t.factors)
    return ScaleTrace(found[0].scaler, factors, tuple(m for t in found for m in t.made), found[0].place)


def of_one_step_each(found: list[ScaleTrace]) -> bool:
    """Whether every scaler attempted one step and was then replaced."""
    return len(found) >= 3 and all(len(t.made) == 1 for t in found)
