"""What a stream of batches gives: its rows, epoch by epoch, and what drew their order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from pytest_trainloop.checks.state.data_order.draws import orders_drawn
from pytest_trainloop.checks.state.data_order.passes import LoaderPasses, Pass
from pytest_trainloop.checks.state.data_order.rows import Batch, rows_of
from pytest_trainloop.whose import reraise_ours

MOST_BATCHES = 400
"""Batches of one epoch that are read, at most."""

MOST_ROWS = 4096
"""Rows of one epoch that are read, at most."""

LEAST_ROWS = 10
"""Different rows below which the same order twice may be chance: of ten rows one in 3.6 million orders is."""

DRAWN = 48
"""Batches that are asked of ``batches(n)``."""

Give = Callable[[], Iterable[Any]]


@dataclass(slots=True)
class Epoch:
    """Batches in their order, and the draws of an order made for them."""

    batches: list[Batch] = field(default_factory=list)
    draws: list[tuple[str, int]] = field(default_factory=list)
    drawn_before: list[int] = field(default_factory=list)
    """How many draws there had been when each batch was there."""
    complete: bool = False
    """Whether the stream came to its end."""
    order: int | None = None
    """The digest of the sampler's indices, of a whole epoch of a map-style data set."""
    ascending: bool = False
    of_loader: bool = False
    """Whether it is the epoch of a DataLoader."""

    @property
    def leaves(self) -> list[str]:
        """The leaves that every batch has."""
        first = self.batches[0] if self.batches else {}
        return [path for path in first if all(path in batch for batch in self.batches)]

    def column(self, path: str) -> tuple[int, ...]:
        """The digests of a leaf, row by row."""
        return tuple(itertools.chain.from_iterable(batch[path].digests for batch in self.batches))

    @property
    def rows(self) -> int:
        return sum(sizes(self.batches))

    def window(self, start: int, stop: int) -> Epoch:
        """These of its batches, with the draws made for them."""
        first = self.drawn_before[start - 1] if start else 0
        return Epoch(self.batches[start:stop], self.draws[first : self.drawn_before[stop - 1]])


@dataclass(slots=True)
class Reading:
    """What was read of one stream."""

    epochs: list[Epoch] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    raised: BaseException | None = None
    at: int = 0
    """The number of the batch that was asked for when it raised."""
    total: int = 0
    """Batches read in all epochs."""
    axis: int = 0

    @property
    def identity(self) -> str:
        """The leaf that tells rows apart: the one of most bytes, and of those the one with most different rows."""
        if not self.epochs or not self.epochs[0].batches:
            return ""
        first = self.epochs[0]
        return max(
            first.leaves,
            key=lambda path: (first.batches[0][path].nbytes, len(set(first.column(path)))),
            default="",
        )

    def rows(self, number: int) -> tuple[int, ...]:
        """The rows of one epoch in their order."""
        return self.epochs[number].column(self.identity) if self.identity else ()


def sizes(batches: Sequence[Batch]) -> list[int]:
    """The number of rows of each batch."""
    return [len(next(iter(batch.values())).digests) if batch else 0 for batch in batches]


def read(
    give: Give,
    *,
    axis: int,
    pads: Collection[int],
    epochs: int = 2,
    most: int = MOST_BATCHES,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Reading:
    """Read a stream as often as ``epochs`` says; one that cannot begin again, once.

    Of a DataLoader those draws count that its sampler makes: what its data set draws is no order. Of other streams, and
    of data sets that only iterate, all that are made while they are read.
    """
    reading, noted = Reading(axis=axis), LoaderPasses()
    with noted.noting(steps=lambda: reading.total):
        try:
            for _ in range(epochs):
                reading.epochs.append(Epoch())
                before = len(noted.passes)
                again = _read_one(reading, give, axis, pads, most, out_of_time)
                _take_order(reading.epochs[-1], noted.passes[before:])
                if not (again and reading.epochs[-1].complete and reading.epochs[-1].batches):
                    break
        except Exception as error:  # of the project's data set, sampler or collate function
            reraise_ours(error)
            reading.raised = error
    reading.passes = noted.passes
    return reading


def _read_one(
    reading: Reading, give: Give, axis: int, pads: Collection[int], most: int, out_of_time: Callable[[], bool]
) -> bool:
    """Read one epoch; whether the stream can begin again."""
    epoch, rows = reading.epochs[-1], 0
    reading.at = 0
    with orders_drawn(epoch.draws, least=LEAST_ROWS):
        stream = give()
        source = iter(stream)
        while len(epoch.batches) < most and rows < MOST_ROWS and not out_of_time():
            try:
                batch = next(source)
            except StopIteration:
                epoch.complete = True
                break
            epoch.batches.append(rows_of(batch, axis, pads))
            epoch.drawn_before.append(len(epoch.draws))
            rows += max(sizes(epoch.batches[-1:]))
            reading.at += 1
            reading.total += 1
    epoch.of_loader = isinstance(stream, DataLoader)
    return not isinstance(stream, (Iterator, list, tuple))


def _take_order(epoch: Epoch, passes: Sequence[Pass]) -> None:
    """Take over the order that one loader's sampler gave, where that is all there was."""
    if len(passes) == 1 and passes[0].indexed:
        epoch.ascending = passes[0].ascending
        epoch.order = passes[0].order if passes[0].complete and passes[0].rows > len(epoch.batches) - 1 else None
    if epoch.of_loader and all(one.indexed for one in passes):
        epoch.draws = [draw for one in passes for draw in one.draws]


def in_this_process(loader: Any) -> Any:
    """The loader itself, reading without workers from now on: for one that is thrown away."""
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.num_workers = 0
        loader.timeout = 0
    return loader


def epochs_of(reading: Reading) -> list[Epoch]:
    """The epochs of a stream: those that were read, or the windows of one that goes on. None where no epoch is seen.

    An epoch is E batches if all windows of E batches that follow one another hold the same rows.
    """
    if len(reading.epochs) > 1 and all(epoch.complete for epoch in reading.epochs):
        return reading.epochs
    batches = reading.epochs[0].batches if reading.epochs else []
    name = reading.identity
    if not name or any(name not in batch for batch in batches):
        return []
    counts = [Counter(batch[name].digests) for batch in batches]
    for length in range(1, len(batches) // 2 + 1):
        windows = [sum(counts[i : i + length], Counter()) for i in range(0, len(batches) - length + 1, length)]
        if all(window == windows[0] for window in windows):
            return [reading.epochs[0].window(i, i + length) for i in range(0, len(batches) - length + 1, length)]
    return []
