"""How many threads torch takes for the runs of a loop: one for a small loop, a worker's share of them for a large one.

Threads of one operation wait for each other, and spin while they wait. Where other processes take the cores, every
operation waits for a thread that does not run: 154 steps of minGPT took 96 s with two threads on two busy cores, and
11 s with one. What a small loop computes in one operation is too little to be shared out in any case; a large one is
timed with both numbers.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = 0.1
"""Seconds of the processor, in one thread and watched, from which on a step is shared out between threads. A battery
makes some 150 steps, so that a loop below it is through in about 15 s."""

ENTRIES, REPEATS = 2**20, 25
"""Of the operation that is timed with one thread and with more: 1 ms, 25 times each."""

_SET_BY_THE_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Threads:
    """The number of threads of one loop. It grows at most once, when the first run shows that a step is large."""

    def __init__(self) -> None:
        self.number = 1
        self._most = 0
        self._began = (-1, 0.0)
        self._large = 0
        self._tried = False

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Torch takes this number of threads in here."""
        before = torch.get_num_threads()
        self._most = self._most or most(before)
        torch.set_num_threads(self.number)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def note(self, steps: int) -> None:
        """So many steps were made: the processor time since the one before is that of a step."""
        now = time.process_time()
        self._large += self._began[0] == steps - 1 and now - self._began[1] >= LARGE
        self._began = steps, now

    @property
    def too_few(self) -> bool:
        """Whether steps are large, and it was not tried whether more threads are faster. One long step says nothing: a
        collection of garbage or an import was part of it."""
        return self._large > 1 and self._most > 1 and not self._tried

    def more(self) -> None:
        """Take all that there are, where the cores are free for them."""
        self._tried = True
        if pays(self._most):
            self.number = self._most


def pays(threads: int) -> bool:
    """Whether an operation is faster with so many threads than with one, now."""
    values = torch.ones(ENTRIES, device="cpu")
    took = {1: 0.0, threads: 0.0}
    before = torch.get_num_threads()
    try:
        for number in (*took,) * REPEATS:
            torch.set_num_threads(number)
            start = time.perf_counter()
            torch.exp(values)
            took[number] += time.perf_counter() - start
    finally:
        torch.set_num_threads(before)
    return took[threads] < took[1]


def most(threads: int) -> int:
    """Of torch's ``threads`` those for one process: each worker of pytest-xdist takes its share, unless the user said
    how many a process has."""
    if any(os.environ.get(name) for name in _SET_BY_THE_USER):
        return threads
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    return max(1, threads // int(workers)) if workers.isdigit() and int(workers) else threads
