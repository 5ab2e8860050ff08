"""Float32 master weights that are overwritten with their own low-precision copies between two steps.

Such a master holds values of the copy's dtype whenever a step begins: those that the step before left in it, rounded.
An update below half a ULP is gone by then, as if there were no master. A master that is set once (from pretrained
weights), or that stays as the step left it, holds other values.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.lost_updates import MOST, EntryUpdates, LostUpdates, spaced_by_index, summed
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
    """Sampled entries of one float32 tensor that an optimizer steps."""

    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    copies: set[int] | None = None
    """Low-precision tensors that held its values before every step so far."""


class OverwrittenMasters:
    """The watched run made once more, with the values of the float32 tensors that optimizers step."""

    def __init__(self, evidence: Evidence) -> None:
        self._rerun = evidence.rerun
        self._masters: dict[int, _Master] = {}

    def lost_updates(self, names: Collection[str], dtypes: Collection[str]) -> list[LostUpdates]:
        """By low-precision copy, the updates of its master that are gone when the next step begins."""
        kinds = {getattr(torch, dtype) for dtype in dtypes}
        record = self._rerun(contexts=lambda watch: (self._watching(watch, kinds),))
        copies = [(record.parameters[i], m) for m in self._masters.values() for i in sorted(m.copies or ())]
        steps = [(p, _updates(master, p.dtype)) for p, master in copies if p.name in names]
        return [summed(p, made, master_overwritten=True) for p, made in steps if made is not None]

    @contextlib.contextmanager
    def _watching(self, watch: Watch, kinds: set[torch.dtype]) -> Iterator[None]:
        def take(optimizer: Any) -> Entries:
            found: Entries = {}
            for group in optimizer.param_groups:
                for p in group["params"]:
                    index = watch.table.index(p)
                    if p.dtype is torch.float32 and p.grad is not None and readable(p) and index is not None:
                        found[index] = spaced_by_index(p.detach()).clone()
                        self._narrow(watch, index, p, kinds)
            return found

        def use(_optimizer: Any, before: Entries) -> None:
            for index, entries in before.items():
                master = self._masters[index]
                if len(master.before) < MOST:
                    master.before.append(entries)
                    master.after.append(spaced_by_index(watch.table.tensors[index].detach()).clone())

        with around_steps(watch, take, use):
            yield

    def _narrow(self, watch: Watch, index: int, p: torch.Tensor, kinds: set[torch.dtype]) -> None:
        """Drop the low-precision tensors that do not hold the master's values before this step."""
        master = self._masters.setdefault(index, _Master())
        held = dict(enumerate(watch.table.tensors))
        among = held if master.copies is None else {i: held[i] for i in master.copies}
        master.copies = {
            i for i, t in among.items() if t.dtype in kinds and t.shape == p.shape and bool((t.detach() == p).all())
        }


def _updates(master: _Master, copy_dtype: str) -> list[EntryUpdates] | None:
    """None where a step finds other values than those that the step before left, rounded."""
    rounded = [entries.to(getattr(torch, copy_dtype)).float() for entries in master.after]
    if any(not torch.equal(r, b) for r, b in zip(rounded, master.before[1:], strict=False)):
        return None
    found = []
    for before, after, low in zip(master.before, master.after, rounded, strict=True):
        due = after.double() - before.double()
        counted = due.isfinite() & (due != 0)
        ulp = spacings(before.double(), copy_dtype)
        found.append(EntryUpdates(before.double(), due, low.double(), counted, counted & (low == before), ulp))
    return found
