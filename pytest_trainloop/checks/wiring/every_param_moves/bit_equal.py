"""Parameters that stay bit-equal although they are stepped with a gradient.

See docs/how-it-decides.md#whether-a-step-changes-a-parameter.

A step that changes w by less than half a ULP of w's dtype changes nothing, however often it is made. The same run in
float64 shows the size of the update; ``initial_lr`` shows the learning rate that a warm-up leads to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.gradients.vectors import values
from pytest_trainloop.optimizers.spacing import lr_growth, spacings
from pytest_trainloop.recording.events import Step
from pytest_trainloop.records.stepped_parameters import LEAST_STEPS, low_precision_stepped, steps_with_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.recording.record import Parameter, Record


@dataclass(frozen=True, slots=True)
class Unmoved:
    """A parameter no sampled entry of which changed."""

    name: str
    dtype: str
    update: float
    """The median size of a step on it in float64, at the learning rate that a warm-up leads to."""
    ulp: float
    """The median distance of its values to the next of its dtype."""

    @property
    def lost(self) -> bool:
        """Whether rounding to nearest takes back every step."""
        return 0.0 < self.update < self.ulp / 2


def bit_equal(record: Record) -> list[Parameter]:
    """Held parameters whose sampled entries were stepped with gradients other than zero and never changed."""
    moved = {i for move in record.moves for i in move.parameters}
    steps = steps_with_gradient(record)
    return [
        p
        for p in record.parameters
        if steps.get(p.index, 0) >= LEAST_STEPS
        and p.index not in moved
        and p.index in record.end
        and p.start.same(record.end[p.index])
        and not p.gone
    ]


def measure(parameters: Sequence[Parameter], native: Record, double: Record) -> list[Unmoved]:
    """How far each moves in float64, and how far apart its values can lie."""
    wide = {p.name: p for p in double.parameters}
    found: list[Unmoved] = []
    for p in parameters:
        other = wide.get(p.name)
        if other is None or other.index not in double.end or not other.start.raw:
            continue
        steps = max(1, sum(other.index in s.updates for s in double.of(Step)) or double.rounds)
        change = values(double.end[other.index], "float64") - values(other.start, "float64")
        typical = float(change.abs().median()) / steps
        update = typical * lr_growth(native, p.index) if typical else 0.0
        found.append(Unmoved(p.name, p.dtype, update, float(spacings(values(p.start, p.dtype), p.dtype).median())))
    return found


def lost_shares(parameters: Sequence[Parameter], native: Record, double: Record) -> dict[str, float]:
    """By parameter, the share of sampled entries that never changed and could not: half a ULP at their value is more
    than the largest entry of any step on this parameter in float64, at the learning rate that a warm-up leads to."""
    wide = {p.name: p for p in double.parameters}
    shares: dict[str, float] = {}
    for p in parameters:
        other = wide.get(p.name)
        if other is None or other.index not in double.end or p.index not in native.end or not other.start.raw:
            continue
        start, end = values(p.start, p.dtype), values(native.end[p.index], p.dtype)
        largest = max(float(values(f, "float64").abs().max()) for f in (other.start, double.end[other.index]))
        steps = [s.updates[other.index] for s in double.of(Step) if other.index in s.updates]
        step = max(steps, default=0.0) * largest * lr_growth(native, p.index)
        lost = (start == end) & (step < spacings(start, p.dtype) / 2)
        shares[p.name] = float(lost.double().mean()) if 0.0 < step < math.inf else 0.0
    return shares


def low_precision_by_torch(record: Record, dtypes: Sequence[str]) -> list[Parameter]:
    """Parameters of these dtypes that were stepped with gradients, and that only optimizers of torch's own move."""
    return [p for p in low_precision_stepped(record, dtypes) if held_by_torch(record, p.index)]


def held_by_torch(record: Record, index: int) -> bool:
    """Whether only optimizers of torch's own hold the parameter."""
    return all(record.optimizers[o].from_torch for o in record.held.get(index, ()))
