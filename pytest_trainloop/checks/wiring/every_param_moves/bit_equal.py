"""Parameters that stay bit-equal although they are stepped with a gradient.

See docs/how-it-decides.md#whether-a-step-changes-a-parameter.

A step that changes w by less than half the spacing of w's dtype changes nothing, however often it is made. The same run
in float64 shows the size of the update; ``initial_lr`` shows the rate that a warm-up leads to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import NOISE
from pytest_trainloop.gradients.vectors import values
from pytest_trainloop.recording.events import Backward, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.recording.record import Parameter, Record

LEAST_STEPS = 3
"""Steps with a gradient before a parameter is called stuck."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A parameter no sampled entry of which moved. ``update`` is the median size of a step on it in float64, at the
    rate that a warm-up leads to; ``spacing`` the median distance of its values to the next of its dtype."""

    name: str
    dtype: str
    update: float
    spacing: float

    @property
    def lost(self) -> bool:
        """Whether rounding to nearest takes back every step."""
        return 0.0 < self.update < self.spacing / 2


def bit_equal(record: Record) -> list[Parameter]:
    """Held parameters whose sampled entries were stepped with gradients other than zero and never changed."""
    moved = {i for move in record.moves for i in move.parameters}
    fed = _fed(record)
    return [
        p
        for p in record.parameters
        if fed.get(p.index, 0) >= LEAST_STEPS
        and p.index not in moved
        and p.index in record.end
        and p.start.same(record.end[p.index])
        and not p.gone
    ]


def _fed(record: Record) -> dict[int, int]:
    """How many steps at a rate above zero consumed a gradient with sampled entries other than zero, and above what is
    left of terms that cancel (a bias before a batch norm)."""
    peaks = [a.incoming.peak for b in record.of(Backward) for arrived in b.arrivals.values() for a in arrived]
    noise = NOISE * max((p for p in peaks if math.isfinite(p)), default=0.0)
    fed: dict[int, int] = {}
    for step in record.of(Step):
        if step.nested or not step.full or not step.reads:
            continue
        optimizer = record.optimizers[step.optimizer]
        group_of = dict(zip(optimizer.parameters, optimizer.groups, strict=True))
        for index, grad in step.reads[-1].grads.items():
            if grad is None or grad.sparse or not noise < grad.peak < math.inf or not any(grad.sample):
                continue
            group = group_of.get(index, 0)
            if group < len(step.rates) and step.rates[group] > 0:
                fed[index] = fed.get(index, 0) + 1
    return fed


def measure(parameters: Sequence[Parameter], native: Record, double: Record) -> list[Stuck]:
    """How far each would move in float64, and how far apart its values can lie."""
    wide = {p.name: p for p in double.parameters}
    found: list[Stuck] = []
    for p in parameters:
        other = wide.get(p.name)
        if other is None or other.index not in double.end or not other.start.sample:
            continue
        steps = max(1, sum(other.index in s.updates for s in double.of(Step)) or double.rounds)
        change = values(double.end[other.index], "float64") - values(other.start, "float64")
        typical = float(change.abs().median()) / steps
        update = typical * growth(native, p.index) if typical else 0.0
        found.append(Stuck(p.name, p.dtype, update, float(spacings(values(p.start, p.dtype), p.dtype).median())))
    return found


def lost_shares(parameters: Sequence[Parameter], native: Record, double: Record) -> dict[str, float]:
    """By parameter, the share of sampled entries that never changed and could not: half the spacing at their value is
    more than the largest entry of any step on this parameter in float64, at the rate that a warm-up leads to."""
    wide = {p.name: p for p in double.parameters}
    shares: dict[str, float] = {}
    for p in parameters:
        other = wide.get(p.name)
        if other is None or other.index not in double.end or p.index not in native.end or not other.start.sample:
            continue
        start, end = values(p.start, p.dtype), values(native.end[p.index], p.dtype)
        largest = max(float(values(f, "float64").abs().max()) for f in (other.start, double.end[other.index]))
        steps = [s.updates[other.index] for s in double.of(Step) if other.index in s.updates]
        step = max(steps, default=0.0) * largest * growth(native, p.index)
        lost = (start == end) & (step < spacings(start, p.dtype) / 2)
        shares[p.name] = float(lost.double().mean()) if 0.0 < step < math.inf else 0.0
    return shares


def low_and_fed(record: Record, dtypes: Sequence[str]) -> list[Parameter]:
    """Parameters of these dtypes that were stepped with gradients, and that nobody but optimizers moves."""
    by_others = {i for move in record.moves if move.by is None for i in move.parameters}
    fed = _fed(record)
    return [
        p
        for p in record.parameters
        if p.dtype in dtypes and fed.get(p.index, 0) >= LEAST_STEPS and p.index not in by_others and not p.gone
    ]


def low_and_stepped(record: Record, dtypes: Sequence[str]) -> list[Parameter]:
    """Those of them that only optimizers of torch's own move."""
    return [
        p
        for p in low_and_fed(record, dtypes)
        if all(record.optimizers[o].from_torch for o in record.held.get(p.index, ()))
    ]


def growth(record: Record, index: int) -> float:
    """By how much a warm-up still raises the rate of the parameter's group: peak over the mean of the rates seen;
    infinity where it rises to what is not known."""
    for optimizer in record.optimizers:
        if index not in optimizer.parameters:
            continue
        group = optimizer.groups[optimizer.parameters.index(index)]
        rates = [s.rates[group] for s in record.of(Step) if s.optimizer == optimizer.index and group < len(s.rates)]
        peak = optimizer.peaks[group] if group < len(optimizer.peaks) else math.nan
        seen = sum(rates) / len(rates) if rates else 0.0
        if len(rates) > 1 and rates[-1] > rates[-2] and not peak > rates[-1]:
            return math.inf  # it still rises, and nobody knows where to
        return max(1.0, peak / seen) if seen > 0 and peak > 0 else 1.0
    return 1.0


def spacings(points: torch.Tensor, dtype: str) -> torch.Tensor:
    """The distance of each value to the next larger one of its dtype."""
    info = torch.finfo(getattr(torch, dtype))
    return info.eps * torch.exp2(torch.floor(torch.log2(points.abs().clamp_min(info.tiny))))
