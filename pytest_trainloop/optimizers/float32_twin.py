"""Optimizers of which nothing is known, raced with themselves in float32: the same gradient, step after step.

Such an optimizer may keep what rounding takes (Kahan summation, stochastic rounding, master weights). Once float32 has
gone several spacings of a weight's dtype, all of these have moved the weight as well; one that stores the rounded sum
has not, and never will.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.lost_updates import Losses, spaced_by_index
from pytest_trainloop.optimizers.replay import kind_of, step
from pytest_trainloop.optimizers.spacing import lr_growth, spacings
from pytest_trainloop.optimizers.widened import NoHalves, reached, widen
from pytest_trainloop.recording.torch_internals import has_step_hooks, is_patched_by_scheduler
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

START = 3
"""The step of an optimizer from which it is raced: its state is made by then."""

FAR = 4.0
"""Spacings that float32 goes before an entry that has its bits as they were counts as lost. Rounding to nearest moves
whatever is stored exactly by half a spacing; one more may be lost on either side of a power of two, where it doubles;
stochastic rounding leaves an entry that is due to move by four spacings in e^-4 of all cases at most, so that a tensor
of which nearly all rest is none of its doing."""

MOST_STEPS = 256
"""A tensor that needs more steps to go so far is not judged."""

TRIED = 8
"""Steps in float32 from which it is told how many are needed."""

MOST_ENTRIES = 8_000_000
"""An optimizer that refers to more, state and all, is not copied."""


@dataclass(slots=True)
class _Racer:
    """A copy of an optimizer and of all that it refers to, with the parameters of the original by index."""

    optimizer: Any
    held: dict[int, torch.Tensor]

    def run(self, grads: Mapping[int, torch.Tensor], steps: int) -> None:
        for _ in range(steps):
            for index, p in self.held.items():
                p.grad = grads[index].to(p.dtype, copy=True)
            step(self.optimizer)

    def values(self) -> dict[int, torch.Tensor]:
        return {index: spaced_by_index(p.detach()).clone() for index, p in self.held.items()}


class Races:
    """A short run in which every optimizer that is not made again entry by entry is raced at its third step."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._run = evidence.run(), evidence.plan(), evidence.rerun
        self._found: dict[int, Losses] = {}

    def losses(self, names: Collection[str], dtypes: Collection[str]) -> list[Losses]:
        """By parameter, where float32 goes far enough for a verdict: ``updates`` counts the entries that it takes
        that far, ``lost`` those of them whose bits are as they were."""
        kinds = {getattr(torch, dtype) for dtype in dtypes}
        record = self._run(
            replace(
                self._plan,
                enough=lambda so_far: so_far.rounds > START,
                contexts=lambda watch: (self._watching(watch, kinds),),
            )
        )
        found = []
        for index, losses in self._found.items():
            p = record.parameters[index]
            if p.name in names:
                found.append(replace(losses, name=p.name, dtype=p.dtype, entries=math.prod(p.shape)))
        return found

    @contextlib.contextmanager
    def _watching(self, watch: Watch, kinds: set[torch.dtype]) -> Iterator[None]:
        steps: dict[int, int] = {}
        racing = False

        def look(optimizer: Any) -> None:
            nonlocal racing
            if racing:  # an optimizer inside of the one that is raced
                return
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
            if steps[id(optimizer)] == START and _unknown(optimizer) and _low_among(optimizer, kinds):
                racing = True
                with contextlib.suppress(Exception), torch.random.fork_rng(_devices(optimizer)):  # a user's step
                    self._race(watch, optimizer, kinds)
                racing = False

        with around_steps(watch, look, lambda _optimizer, _none: None):
            yield

    def _race(self, watch: Watch, optimizer: Any, kinds: set[torch.dtype]) -> None:
        grads = {
            index: p.grad.detach().clone()
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and (index := watch.book.index(p)) is not None
        }
        factors = [_growth(self._seen, watch, group) for group in optimizer.param_groups]
        if not all(map(math.isfinite, factors)):
            return
        low, wide = (_racer(watch, optimizer, grads, factors) for _ in range(2))
        widen(vars(wide.optimizer))
        before = low.values()
        judged = [i for i, entries in before.items() if entries.dtype in kinds]
        with NoHalves():  # type: ignore[no-untyped-call]
            wide.run(grads, TRIED)
            tried = wide.values()
            needed = [math.ceil(TRIED * FAR * 2 / m) for i in judged if (m := _median_spacings(before[i], tried[i]))]
            steps = max((n for n in needed if n <= MOST_STEPS), default=0)
            wide.run(grads, max(0, steps - TRIED))
        low.run(grads, max(steps, TRIED))
        after, there = low.values(), wide.values()
        for i in judged:
            losses = _compared(before[i], after[i], there[i], max(steps, TRIED))
            if losses.updates:
                self._found[i] = losses


def _unknown(optimizer: Any) -> bool:
    """Whether its steps are not those of torch that are made again entry by entry, and no hooks or wrappers of its own
    do a part of them."""
    patched = vars(optimizer).get("step")
    wrapped = patched is None or is_patched_by_scheduler(patched)
    return kind_of(optimizer) is None and not has_step_hooks(optimizer) and wrapped


def _low_among(optimizer: Any, kinds: set[torch.dtype]) -> bool:
    low = any(p.dtype in kinds for group in optimizer.param_groups for p in group["params"])
    return low and sum(t.numel() for t in reached(vars(optimizer))) <= MOST_ENTRIES


def _devices(optimizer: Any) -> set[torch.device]:
    return {p.device for group in optimizer.param_groups for p in group["params"] if p.is_cuda}


def _growth(seen: Record, watch: Watch, group: Mapping[str, Any]) -> float:
    """By how much a warm-up still raises the rate of this group."""
    indices = [watch.book.index(p) for p in group["params"]]
    return max((lr_growth(seen, i) for i in indices if i is not None), default=1.0)


def _racer(watch: Watch, optimizer: Any, grads: Collection[int], factors: list[float]) -> _Racer:
    """Below the class's own way to be copied: that one keeps groups and state only."""
    fresh = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): fresh}
    vars(fresh).update(copy.deepcopy(vars(optimizer), memo))
    for group, factor in zip(fresh.param_groups, factors, strict=True):
        if factor != 1.0 and "lr" in group:
            group["lr"] = group["lr"] * factor
    held = {
        index: memo[id(p)]
        for group in optimizer.param_groups
        for p in group["params"]
        if (index := watch.book.index(p)) is not None and index in grads and id(p) in memo
    }
    return _Racer(fresh, held)


def _median_spacings(before: torch.Tensor, after: torch.Tensor) -> float:
    """How far the typical entry that moves at all goes, in spacings of the dtype before."""
    way = (after.double() - before.double()).abs()
    moved = way[way > 0] / spacings(before.double(), _name(before))[way > 0]
    return float(moved.median()) if moved.numel() else 0.0


def _compared(before: torch.Tensor, after: torch.Tensor, there: torch.Tensor, steps: int) -> Losses:
    dtype, start = _name(before), before.double()
    way = there - start
    wide = torch.maximum(spacings(start, dtype), spacings(there, dtype))
    far = way.isfinite() & (way.abs() >= FAR * wide)
    losses = Losses("", dtype, 0, steps=steps, sampled=len(before), raced=True)
    losses.updates, losses.lost = int(far.sum()), int((far & (after == before)).sum())
    losses.way = float(way[far].abs().sum())
    losses.gone = float(((after.double() - start) * way.sign())[far].sum())
    if losses.updates:
        losses.update = float(way[far].abs().median()) / steps
        losses.spacing = float(wide[far].median())
    return losses


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
