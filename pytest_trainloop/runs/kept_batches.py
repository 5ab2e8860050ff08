"""The first batches of a DataLoader with worker processes, read once.

To start workers takes tens of milliseconds where they are forked, and seconds where they are spawned, each with torch
to import; and a battery makes some twenty runs that read the loader. Under one seed, with the same knobs and the same
precision every run would read the same batches, and ``fit`` gets copies of them anyway. ``determinism``, which asks
whether that is so, reads again. A loader of another class than torch's own is read in each run: iterating over it may
do more than give batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_BATCHES = 32
"""Batches that are kept: two of the longest plain runs."""


@dataclass(slots=True)
class KeptBatches:
    """The first batches of one loader, and whether these are all."""

    batches: list[Any] = field(default_factory=list)
    complete: bool = False

    def through(self, loader: Any) -> Iterator[Any]:
        """The batches of the loader, which is asked for those only that are not kept yet."""
        source: Iterator[Any] | None = None
        position = 0
        while position < len(self.batches) or not self.complete:
            if position < len(self.batches):
                item = self.batches[position]
            else:
                if source is None:
                    source = _past(iter(loader), position)
                try:
                    item = next(source)
                except StopIteration:
                    self.complete = position == len(self.batches)
                    return
                if position < MOST_BATCHES:
                    self.batches.append(item)
            yield item
            position += 1


@dataclass(slots=True)
class LoaderBatches:
    """Those of the loaders of one function, which builds another for each seed, knob and precision."""

    _kept: dict[tuple[int, str, bool], KeptBatches] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(kept.batches for kept in self._kept.values())

    def of(self, seed: int, knobs: Mapping[str, Any], *, double: bool = False) -> KeptBatches:
        return self._kept.setdefault((seed, repr(sorted(knobs.items())), double), KeptBatches())


def has_workers(loader: Any) -> bool:
    return type(loader) is DataLoader and loader.num_workers > 0


def _past(source: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(source, None)
    return source
