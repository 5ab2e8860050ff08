"""Updates that rounding takes back: each watched step repeated in float64, from the same values of the same entries.

An update is lost where float64 moves the entry and the step that was made leaves its bits as they were, and where
rounding would do so too at the learning rate that the schedule leads to and with the momentum still to build up.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.instruments.optimizers.replay import REFUSED, snapshot, stepped
from pytest_trainloop.instruments.optimizers.spacing import lr_growth, spacings
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.samples import spaced
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pytest_trainloop.instruments.optimizers.replay import Snapshot
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST_STEPS = 12
"""Steps of a parameter that are repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostUpdates:
    """The updates of one parameter's sampled entries, and how many of them rounding took back."""

    name: str
    dtype: str
    entries: int
    """Of the parameter, sampled or not."""
    state: tuple[str, ...] = ()
    """Dtypes of the optimizer's state."""
    steps: int = 0
    sampled: int = 0
    """Entries sampled, summed over the steps."""
    updates: int = 0
    """Updates that float64 makes where there is a gradient."""
    lost: int = 0
    """Those of them that leave the bits of the entry as they were."""
    due: float = 0.0
    """Summed size of the updates in float64."""
    made: float = 0.0
    """Summed size of the updates after rounding, in the direction that is due."""
    update: float = 0.0
    """Median size of an update in one step."""
    ulp: float = 0.0
    """Median distance from an entry to the next number of its dtype."""
    from_twin: bool = False
    """Whether the steps of a copy were counted."""
    master_overwritten: bool = False
    """Whether these are updates of a float32 master that is overwritten with this tensor between steps."""

    @property
    def share(self) -> float:
        """Of the updates, by their number."""
        return self.lost / self.updates if self.updates else 0.0

    @property
    def share_of_size(self) -> float:
        """Of the updates, by their summed size: those rounded up make up for some that are lost."""
        return max(0.0, 1.0 - self.made / self.due) if self.due > 0.0 else 0.0

    @property
    def updates_of_all_entries(self) -> float:
        """Extrapolated from the sample."""
        return self.updates / self.sampled * self.entries if self.sampled else 0.0


@dataclass(frozen=True, slots=True)
class EntryUpdates:
    """The updates of one parameter's sampled entries in one step, as vectors."""

    before: torch.Tensor
    """Values in float64."""
    due: torch.Tensor
    """Updates in float64, without rounding."""
    after: torch.Tensor
    """Values in float64, after rounding."""
    counted: torch.Tensor
    """Mask of the updates that count."""
    lost: torch.Tensor
    """Mask of those among them that rounding takes back."""
    ulp: torch.Tensor


def summed(p: Parameter, each: Sequence[EntryUpdates], **fields: Any) -> LostUpdates:
    """What the steps of one parameter lose together."""
    updates = sum(int(s.counted.sum()) for s in each)
    return LostUpdates(
        name=p.name,
        dtype=p.dtype,
        entries=math.prod(p.shape),
        sampled=sum(len(s.counted) for s in each),
        updates=updates,
        lost=sum(int(s.lost.sum()) for s in each),
        due=sum(float(s.due[s.counted].abs().sum()) for s in each),
        made=sum(float(((s.after - s.before) * s.due.sign())[s.counted].sum()) for s in each),
        ulp=float(torch.cat([s.ulp[s.counted] for s in each]).median()) if updates else 0.0,
        **{
            "steps": sum(bool(s.counted.any()) for s in each),
            "update": float(torch.cat([s.due[s.counted].abs() for s in each]).median()) if updates else 0.0,
            **fields,
        },
    )


@dataclass(frozen=True, slots=True)
class _Repeated:
    """One step of one parameter, repeated in float64 on sampled entries."""

    before: torch.Tensor
    after: torch.Tensor
    wide: torch.Tensor
    """The entries after the same step in float64."""
    with_gradient: torch.Tensor
    lr: float
    momentum: float
    """The share of the momentum that has built up by this step."""
    state: tuple[str, ...]

    def updates(self, highest_lr: float) -> EntryUpdates:
        before, (lr, momentum) = self.before.to(torch.float64), (self.lr, self.momentum)
        due = (self.wide - before) * (max(1.0, highest_lr / lr) / momentum if lr > 0.0 and momentum > 0.0 else math.inf)
        rounded = (before + due).to(self.before.dtype)
        counted = self.with_gradient & due.isfinite() & (due != 0)
        lost = counted & (self.after == self.before) & (rounded == self.before)
        ulp = spacings(before, str(self.before.dtype).removeprefix("torch."))
        return EntryUpdates(before, due, rounded.to(torch.float64), counted, lost, ulp)


class RepeatedSteps:
    """The watched run made once more, each step of some low-precision parameters repeated in float64."""

    def __init__(self, evidence: Evidence) -> None:
        self._rerun = evidence.rerun
        self._steps: dict[int, list[_Repeated]] = defaultdict(list)

    def lost_updates(self, names: Collection[str], dtypes: Collection[str]) -> list[LostUpdates]:
        """By parameter, where at least one of its steps could be repeated. A parameter whose learning rate still rises
        to an unknown value is left out."""
        kinds = {getattr(torch, dtype) for dtype in dtypes}
        record = self._rerun(contexts=lambda watch: (self._watching(watch, kinds),))
        found = []
        for index, steps in self._steps.items():
            p, lr = record.parameters[index], highest_lr(record, index)
            if p.name in names and lr < math.inf:
                state = tuple(sorted({dtype for s in steps for dtype in s.state}))
                found.append(summed(p, [s.updates(lr) for s in steps], state=state))
        return found

    @contextlib.contextmanager
    def _watching(self, watch: Watch, kinds: set[torch.dtype]) -> Iterator[None]:
        def take(optimizer: Any) -> Snapshot | None:
            return snapshot(optimizer, watch, spaced_by_index, lambda p: p.dtype in kinds)

        with around_steps(watch, take, lambda _optimizer, snap: self._repeat(watch, snap)):
            yield

    def _repeat(self, watch: Watch, snap: Snapshot) -> None:
        try:
            wide = stepped(snap, wide=True)
        except REFUSED:
            return
        for group in snap.groups:
            lr, beta = group.options.get("lr"), float(group.options.get("momentum") or 0.0)
            lr = math.nan if lr is None else float(lr)
            for m in group.members:
                steps = self._steps[m.index]
                now = spaced_by_index(watch.table.tensors[m.index].detach())
                if len(steps) < MOST_STEPS and now.dtype is m.entries.dtype and len(now) == len(m.entries):
                    momentum = 1.0 - beta ** (len(steps) + 1)
                    after, moved = now.clone(), m.grad != 0
                    steps.append(_Repeated(m.entries, after, wide[m.index], moved, lr, momentum, m.state_dtypes))


def spaced_by_index(tensor: torch.Tensor) -> torch.Tensor:
    """Some entries at even spacing by index, whatever the layout: the same ones of a parameter and its state."""
    return spaced(tensor.contiguous())


def highest_lr(record: Record, index: int) -> float:
    """The highest learning rate of a parameter's group that was seen or that its schedule is known to lead to; infinity
    where it rises to an unknown value."""
    lrs = [
        s.lrs[group]
        for o in record.optimizers
        if index in o.parameters
        for group in [o.groups[o.parameters.index(index)]]
        for s in record.of(Step)
        if s.optimizer == o.index and group < len(s.lrs)
    ]
    mean = sum(lrs) / len(lrs) if lrs else 0.0
    return max([lr_growth(record, index) * mean, *lrs])
