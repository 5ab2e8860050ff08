"""Entries that are kept until the run ends, in a few large blocks for each device and dtype.

Thousands of small tensors that outlive their step leave holes between the large ones that come and go: the allocator
can give them to nothing else, and the process grows by half.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 32_768
"""Entries of a block."""

NonFinite = Literal["", "inf", "nan"]

_KINDS: tuple[NonFinite, ...] = ("", "inf", "nan")


class Kept(NamedTuple):
    """Where entries are kept."""

    block: int
    first: int
    end: int


class Store:
    """Keeps copies of entries; ``take_samples`` and ``take_floats`` read them back, with one transfer a block."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used: list[int] = []
        self._last: dict[tuple[torch.device, torch.dtype], int] = {}
        self._lock = threading.RLock()  # see samples.Reader

    def keep(self, entries: torch.Tensor) -> Kept:
        """Copy the entries of a flat tensor."""
        room, kept = self.room(entries, entries.numel())
        room.copy_(entries)
        return kept

    def keep_all(self, entries: list[torch.Tensor]) -> list[Kept]:
        """Copy the entries of flat tensors of one device and dtype: together, in a fraction of the time."""
        counts = [e.numel() for e in entries]
        room, kept = self.room(entries[0], sum(counts))
        torch.cat(entries, out=room)
        ends = itertools.accumulate(counts, initial=kept.first)
        return [Kept(kept.block, first, end) for first, end in itertools.pairwise(ends)]

    def keep_pairs(self, entries: list[torch.Tensor]) -> list[Kept]:
        """Copy scalar tensors of one device and dtype, two for each place."""
        room, kept = self.room(entries[0], len(entries))
        torch.stack(entries, out=room)
        return [Kept(kept.block, first, first + 2) for first in range(kept.first, kept.end, 2)]

    def room(self, like: torch.Tensor, count: int) -> tuple[torch.Tensor, Kept]:
        """Room for ``count`` entries of the tensor's device and dtype, to be written at once."""
        with self._lock:
            number = self._last.get((like.device, like.dtype))
            if number is None or self._used[number] + count > BLOCK:
                number = self._begin(like, max(count, BLOCK))
            first = self._used[number]
            self._used[number] = behind = first + count
        return self._blocks[number][first:behind], Kept(number, first, behind)

    def _begin(self, like: torch.Tensor, count: int) -> int:
        with torch.inference_mode(False):  # a block may not be written outside that mode if it is made in it
            self._blocks.append(torch.empty(count, dtype=like.dtype, device=like.device))
        self._used.append(0)
        number = self._last[like.device, like.dtype] = len(self._blocks) - 1
        return number

    def take_samples(self) -> Callable[[Kept], tuple[bytes, NonFinite]]:
        """Read and release all blocks: a function from kept entries to their bytes, and what in them is not finite."""
        raw: list[tuple[bytes, int, bytes]] = []
        for block in self._taken():
            here = block.cpu()
            joined = ctypes.string_at(here.data_ptr(), here.numel() * here.itemsize)
            raw.append((joined, here.itemsize, _nonfinite(here)))

        def read(kept: Kept) -> tuple[bytes, NonFinite]:
            number, first, behind = kept
            joined, size, kinds = raw[number]
            return joined[first * size : behind * size], _KINDS[max(kinds[first:behind], default=0)]

        return read

    def take_floats(self) -> Callable[[Kept], list[float]]:
        """The same with floats; of complex entries the absolute value."""
        values: list[list[float]] = []
        for block in self._taken():
            real = block.abs() if block.is_complex() else block
            values.append(real.to(torch.float64).tolist())

        def read(kept: Kept) -> list[float]:
            number, first, behind = kept
            return values[number][first:behind]

        return read

    def _taken(self) -> Iterator[torch.Tensor]:
        """The written part of each block, one at a time."""
        for number, used in enumerate(self._used):
            block, self._blocks[number] = self._blocks[number], torch.empty(0)
            yield block[:used]
        self._blocks, self._used, self._last = [], [], {}


def _nonfinite(block: torch.Tensor) -> bytes:
    """For each entry its place in ``_KINDS``; nothing where all are finite."""
    if not (block.is_floating_point() or block.is_complex()):
        return b""
    wide = block.to(torch.complex128 if block.is_complex() else torch.float64)  # torch has no isfinite for float8
    if bool(wide.isfinite().all()):
        return b""
    return bytes((wide.isfinite().logical_not().to(torch.uint8) + wide.isnan().to(torch.uint8)).tolist())
