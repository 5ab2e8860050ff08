"""Batches that are ready before the loop asks for them, so that copying them is not timed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from pytest_trainloop.declare import nested
from pytest_trainloop.runs.batch_stream import Batches, first_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.declare.loop import TrainLoop


MOST_BYTES = 2**28
"""Of copies made ahead. To make one between two steps costs the next step some 40 us, since what it works with has left
the processor's cache: nothing to the steps on batches so large."""


class ReadyBatches(Batches):
    """The first ``distinct`` batches of the loop over and over, ``count`` of them in a pass.

    ``prepare`` makes copies. One that is asked for without being ready is made inside ``unprepared``, which can
    stop a clock. The other keywords are those of ``Batches``.
    """

    def __init__(
        self,
        loop: TrainLoop,
        count: int,
        *,
        distinct: int,
        unprepared: Callable[[Callable[[], Any]], Any],
        **given: Any,
    ) -> None:
        drawn = first_batches(loop, min(count, distinct))
        super().__init__(loop, count, stream=itertools.cycle(drawn), **given)
        self._ready: dict[int, Any] = {}
        self._next_position = 0
        self._unprepared = unprepared

    def prepare(self) -> None:
        """Make copies of the batches of the pass, or of as many as fit into 256 MiB. Nothing where some are ready."""
        if self._ready:
            return
        size = sum(t.element_size() * t.numel() for t in nested.tensors(super()._fresh(0)))
        first = self._next_position % len(self)
        for position in range(first, min(len(self), first + max(1, MOST_BYTES // max(size, 1)))):
            self._ready[position] = super()._fresh(position)

    def close(self) -> None:
        super().close()
        self._ready.clear()

    def _fresh(self, position: int) -> Any:
        self._next_position = position + 1
        if position in self._ready:
            return self._ready.pop(position)
        fresh = super()._fresh
        return self._unprepared(lambda: fresh(position))
