"""Entries that are kept until the run is over, in a few large blocks for each device and dtype.

Thousands of small tensors that outlive their step leave holes between the large ones that come and go: the allocator
can give them to nothing else, and the process grows by half.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 32_768
"""Entries of a block."""

Kept = tuple[int, int, int]
"""Where entries are kept: block, first, behind the last."""


class Store:
    """Keeps copies of entries; ``take_bytes`` and ``take_floats`` read them back, with one transfer a block."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used: list[int] = []
        self._last: dict[tuple[torch.device, torch.dtype], int] = {}
        self._lock = threading.RLock()  # see facts.Reader

    def keep(self, entries: torch.Tensor) -> Kept:
        """Copy the entries of a flat tensor."""
        room, kept = self.room(entries, entries.numel())
        room.copy_(entries)
        return kept

    def room(self, like: torch.Tensor, count: int) -> tuple[torch.Tensor, Kept]:
        """Room for so many entries of the tensor's device and dtype, to be written at once."""
        with self._lock:
            number = self._last.get((like.device, like.dtype))
            if number is None or self._used[number] + count > BLOCK:
                number = self._begin(like, max(count, BLOCK))
            first = self._used[number]
            self._used[number] = behind = first + count
        return self._blocks[number][first:behind], (number, first, behind)

    def _begin(self, like: torch.Tensor, count: int) -> int:
        with torch.inference_mode(False):  # a block may not be written outside that mode if it is made in it
            self._blocks.append(torch.empty(count, dtype=like.dtype, device=like.device))
        self._used.append(0)
        number = self._last[like.device, like.dtype] = len(self._blocks) - 1
        return number

    def take_bytes(self) -> Callable[[Kept], bytes]:
        """Read all blocks and let go of them: the bytes of what was kept."""
        raw: list[tuple[bytes, int]] = []
        for block in self._taken():
            here = block.cpu()
            raw.append((ctypes.string_at(here.data_ptr(), here.numel() * here.itemsize), here.itemsize))

        def read(kept: Kept) -> bytes:
            number, first, behind = kept
            joined, size = raw[number]
            return joined[first * size : behind * size]

        return read

    def take_floats(self) -> Callable[[Kept], list[float]]:
        """The same as floats; the absolute value of what is complex."""
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
