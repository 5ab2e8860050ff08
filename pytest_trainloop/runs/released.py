"""Return the memory of earlier runs before the next one begins.

A big loop leaves two things behind. Objects in reference cycles (a trainer that its model knows) wait for the garbage
collector, which counts objects and not bytes. And glibc keeps what was freed: aligned blocks, as torch asks for, rarely
fit into holes between others, so that each run takes new pages. Ten runs would hold ten models.

Nothing is done for a loop whose weights are smaller than ``LEAST_BYTES``: the collector costs more than its runs.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.record import Record

LEAST_BYTES = 16 * 2**20
"""Bytes of weights from which on memory is returned after each run."""


PASSES = 2
"""Of the collector: what a graph of autograd holds is found only once that graph is freed."""


class Memory:
    """The memory of the process, or of its CUDA devices, between the runs of one loop."""

    def __init__(self) -> None:
        self._weights = 0
        self._least: tuple[int, int] | None = None

    def learn(self, record: Record) -> None:
        """Note the size of the loop by the record of a run."""
        self._weights = weight_bytes(record)

    def release(self) -> None:
        """Return what earlier runs left, where that is as much as the weights or more.

        The collector, which goes through all objects of the process, is called only where it is not the allocator that
        holds so much.
        """
        if self._weights < LEAST_BYTES:
            return
        if self._above_least():
            return_free_pages()
        for _ in range(PASSES if self._above_least() else 0):
            gc.collect()
        if self._above_least():
            return_free_pages()
            self._least = in_use()
        self._least = min(self._least or in_use(), in_use())

    def _above_least(self) -> bool:
        here = in_use()
        if self._least is None or not here[0]:
            return True
        return any(now - least >= self._weights for now, least in zip(here, self._least, strict=True))


def weight_bytes(record: Record) -> int:
    """The size of all parameters of the loop, in bytes."""
    return sum(math.prod(p.shape) * getattr(torch, p.dtype).itemsize for p in record.parameters)


def in_use() -> tuple[int, int]:
    """Bytes of the process that are in memory (0 where the platform does not tell), and of tensors on CUDA devices."""
    cuda = sum(torch.cuda.memory_allocated(d) for d in range(torch.cuda.device_count())) if _on_cuda() else 0
    return _resident(), cuda


def _on_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def return_free_pages() -> None:
    """Have the C library return what it holds of freed memory; nothing where it has no call for it."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    """``malloc_trim`` of glibc; other C libraries have none, and macOS and Windows return pages by themselves."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
