"""Master weights that are written over with their own low-precision copies between two steps.

Such a master has a value of the copy's dtype whenever a step begins: what the step before had left in it, rounded. An
update below half a spacing is gone by then, as if there were no master. One that is set once (from loaded weights), or
stays as the step left it, has other values.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.lost_updates import MOST, Losses, spaced_by_index
from pytest_trainloop.optimizers.spacing import spacings
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

    Entries = dict[int, torch.Tensor]


@dataclass(slots=True)
class _Master:
    """Sampled entries of one master before and after each step, and the copies that it had the values of by then."""

    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    copies: set[int] | None = None


class Refreshed:
    """The watched run made once more, with a look at float32 tensors that optimizers step."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._run = evidence.run(), evidence.plan(), evidence.rerun
        self._masters: dict[int, _Master] = {}

    def losses(self, names: Collection[str], dtypes: Collection[str]) -> list[Losses]:
        """By low-precision copy, the updates of its master that are gone when the next step begins."""
        kinds = {getattr(torch, dtype) for dtype in dtypes}
        record = self._run(replace(self._plan, contexts=lambda watch: (self._watching(watch, kinds),)))
        found = []
        for master in self._masters.values():
            for index in sorted(master.copies or ()):
                p = record.parameters[index]
                losses = _summed(master, Losses(p.name, p.dtype, math.prod(p.shape), refreshed=True))
                if losses is not None and p.name in names:
                    found.append(losses)
        return found

    @contextlib.contextmanager
    def _watching(self, watch: Watch, kinds: set[torch.dtype]) -> Iterator[None]:
        def take(optimizer: Any) -> Entries:
            found: Entries = {}
            for group in optimizer.param_groups:
                for p in group["params"]:
                    index = watch.book.index(p)
                    if p.dtype is torch.float32 and p.grad is not None and readable(p) and index is not None:
                        found[index] = spaced_by_index(p.detach()).clone()
                        self._match(watch, index, p, kinds)
            return found

        def use(_optimizer: Any, before: Entries) -> None:
            for index, entries in before.items():
                master = self._masters[index]
                if len(master.before) < MOST:
                    master.before.append(entries)
                    master.after.append(spaced_by_index(watch.book.tensors[index].detach()).clone())

        with around_steps(watch, take, use):
            yield

    def _match(self, watch: Watch, index: int, p: torch.Tensor, kinds: set[torch.dtype]) -> None:
        """Keep those low-precision tensors that have had the master's values at every step."""
        master = self._masters.setdefault(index, _Master())
        held = dict(enumerate(watch.book.tensors))
        among = held if master.copies is None else {i: held[i] for i in master.copies}
        master.copies = {
            i for i, t in among.items() if t.dtype in kinds and t.shape == p.shape and bool((t.detach() == p).all())
        }


def _summed(master: _Master, losses: Losses) -> Losses | None:
    """None where a step finds something else than what the one before had left, rounded."""
    dtype = getattr(torch, losses.dtype)
    rounded = [entries.to(dtype).float() for entries in master.after]
    if any(not torch.equal(r, b) for r, b in zip(rounded, master.before[1:], strict=False)):
        return None
    for before, after, low in zip(master.before, master.after, rounded, strict=True):
        update = after.double() - before.double()
        counted = update.isfinite() & (update != 0)
        losses.steps += bool(counted.any())
        losses.sampled += len(before)
        losses.updates += int(counted.sum())
        losses.lost += int((counted & (low == before)).sum())
        losses.way += float(update[counted].abs().sum())
        losses.gone += float(((low.double() - before.double()) * update.sign())[counted].sum())
    if losses.updates:
        first = master.after[0].double() - master.before[0].double()
        losses.update = float(first.abs().median())
        losses.spacing = float(spacings(master.before[0].double(), losses.dtype).median())
    return losses
