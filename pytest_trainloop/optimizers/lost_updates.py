"""Updates that rounding takes back: each watched step made again in float64, from the same values of the same entries.

An update is lost where float64 moves the entry and the step that was made leaves its bits as they were, and where
rounding does so too at the rate that the schedule leads to and with the momentum that is yet to gather.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.replay import REFUSED, snapshot, stepped
from pytest_trainloop.optimizers.spacing import lr_growth, spacings
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.samples import spaced
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_trainloop.optimizers.replay import Snapshot
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 12
"""Steps of a parameter that are made again."""


@dataclass(slots=True)
class Losses:
    """Of one parameter: how many updates of sampled entries float64 made with a gradient, how many of them were lost,
    how far they would go in all and how far they went once rounded; the medians of their sizes and of the spacing of
    the values. ``raced`` says that steps of a copy were counted, ``refreshed`` that these are updates of a float32
    master which is written over with this tensor."""

    name: str
    dtype: str
    entries: int
    state: tuple[str, ...] = ()
    steps: int = 0
    updates: int = 0
    lost: int = 0
    way: float = 0.0
    gone: float = 0.0
    sampled: int = 0
    update: float = 0.0
    spacing: float = 0.0
    raced: bool = False
    refreshed: bool = False

    @property
    def share(self) -> float:
        """Of the updates."""
        return self.lost / self.updates if self.updates else 0.0

    @property
    def share_of_way(self) -> float:
        """Of the way that the updates would go in all: some are rounded up, and go farther than they should."""
        return max(0.0, 1.0 - self.gone / self.way) if self.way > 0.0 else 0.0

    @property
    def weight(self) -> float:
        """Updates of all its entries, as the sample has it."""
        return self.updates / self.sampled * self.entries if self.sampled else 0.0


@dataclass(slots=True)
class _Made:
    """One step of one parameter."""

    before: torch.Tensor
    after: torch.Tensor
    wide: torch.Tensor
    fed: torch.Tensor
    rate: float
    gathered: float


@dataclass(slots=True)
class _Kept:
    made: list[_Made] = field(default_factory=list)
    state: set[str] = field(default_factory=set)


class Updates:
    """The watched run made once more, each step of some low-precision parameters made again in float64."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._run = evidence.run(), evidence.plan(), evidence.rerun
        self._kept: dict[int, _Kept] = {}

    def losses(self, names: Collection[str], dtypes: Collection[str]) -> list[Losses]:
        """By parameter, where at least one of its steps could be made again. Parameters whose rate still rises to what
        is not known are left out."""
        kinds = {getattr(torch, dtype) for dtype in dtypes}
        record = self._run(replace(self._plan, contexts=lambda watch: (self._watching(watch, kinds),)))
        found = []
        for index, kept in self._kept.items():
            p = record.parameters[index]
            peak = peak_rate(record, index)
            if p.name in names and peak < math.inf:
                found.append(_summed(Losses(p.name, p.dtype, math.prod(p.shape)), kept, peak))
        return found

    @contextlib.contextmanager
    def _watching(self, watch: Watch, kinds: set[torch.dtype]) -> Iterator[None]:
        def take(optimizer: Any) -> Snapshot | None:
            return snapshot(optimizer, watch, spaced_by_index, lambda p: p.dtype in kinds)

        with around_steps(watch, take, lambda _optimizer, snap: self._step_again(watch, snap)):
            yield

    def _step_again(self, watch: Watch, snap: Snapshot) -> None:
        try:
            wide = stepped(snap, wide=True)
        except REFUSED:
            return
        for group in snap.groups:
            for m in group.members:
                kept = self._kept.setdefault(m.index, _Kept())
                if len(kept.made) >= MOST:
                    continue
                now = spaced_by_index(watch.book.tensors[m.index].detach())
                if now.dtype is m.entries.dtype and len(now) == len(m.entries):
                    gathered = 1.0 - float(group.options.get("momentum", 0.0)) ** (len(kept.made) + 1)
                    rate = float(group.options.get("lr", math.nan))
                    kept.made.append(_Made(m.entries, now.clone(), wide[m.index], m.grad != 0, rate, gathered))
                    kept.state.update(m.state_dtypes)


def spaced_by_index(tensor: torch.Tensor) -> torch.Tensor:
    """Some entries at even spacing by index, whatever the layout: the same ones of a parameter and its state."""
    return spaced(tensor.contiguous())


def peak_rate(record: Record, index: int) -> float:
    """The highest rate of a parameter's group that was seen or that its schedule is known to lead to; infinity where it
    rises to what is not known."""
    rates = [
        s.rates[group]
        for o in record.optimizers
        if index in o.parameters
        for group in [o.groups[o.parameters.index(index)]]
        for s in record.of(Step)
        if s.optimizer == o.index and group < len(s.rates)
    ]
    mean = sum(rates) / len(rates) if rates else 0.0
    return max([lr_growth(record, index) * mean, *rates])


def _summed(losses: Losses, kept: _Kept, peak: float) -> Losses:
    sizes: list[torch.Tensor] = []
    distances: list[torch.Tensor] = []
    for made in kept.made:
        before = made.before.to(torch.float64)
        factor = max(1.0, peak / made.rate) / made.gathered if made.rate > 0.0 and made.gathered > 0.0 else math.inf
        update = (made.wide - before) * factor
        counted = made.fed & update.isfinite() & (update != 0)
        rounded = (before + update).to(made.before.dtype)
        lost, size = counted & (made.after == made.before) & (rounded == made.before), update.abs()
        losses.steps += bool(counted.any())
        losses.sampled += len(counted)
        losses.updates += int(counted.sum())
        losses.lost += int(lost.sum())
        losses.way += float(size[counted].sum())
        losses.gone += float(((rounded.to(torch.float64) - before) * update.sign())[counted].sum())
        sizes.append(size[counted])
        distances.append(spacings(before[counted], losses.dtype))
    if losses.updates:
        losses.update = float(torch.cat(sizes).median())
        losses.spacing = float(torch.cat(distances).median())
    losses.state = tuple(sorted(kept.state))
    return losses
