"""What epochs contradict in themselves: the pairing of inputs and labels, the order, what comes again."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.state.data_order.streams import LEAST_ROWS, Epoch, Reading, sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.state.data_order.passes import Pass
    from pytest_trainloop.checks.state.data_order.rows import Batch

ENOUGH = 10.0
"""Bits: of 1024 streams that draw some labels anew fewer than one holds as many of each kind every time."""

SAME_BATCHES = 8
"""Batches that hold the same rows, at least, for a stream of one batch."""

LABEL_ROWS = 4
"""Rows of a batch with one label, at least."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Inputs and labels that are paired otherwise in another epoch."""

    inputs: str
    labels: str
    rows: int
    changed: int
    """Rows that come with another label in the other epoch."""


def labels_apart(reading: Reading, epochs: Sequence[Epoch]) -> Apart | None:
    """Two leaves that hold the same rows in two epochs, and not the same pairs of them."""
    x = reading.identity
    for first, second in itertools.islice(itertools.combinations(epochs, 2), 8):
        leaves = [path for path in first.leaves if path in second.leaves]
        for y in leaves:
            if y == x or x not in leaves or len(set(first.column(y))) < 2 or _is_an_order(first, y):
                continue
            mine, other = list(_pairs(first, x, y)), list(_pairs(second, x, y))
            if any(Counter(map(_at(i), mine)) != Counter(map(_at(i), other)) for i in (0, 1)):
                continue
            if Counter(mine) != Counter(other) and not _has_stable_copy(first, second, x, y):
                return Apart(x, y, len(mine), _changed(mine, other))
    return None


def _is_an_order(epoch: Epoch, y: str) -> bool:
    """Whether every batch holds the same values, each once: the numbers of its rows."""
    whole = [batch[y].digests for batch in epoch.batches[:-1]]
    return len(whole) > 1 and len({frozenset(rows) for rows in whole}) == 1 and len(set(whole[0])) == len(whole[0])


def comes_apart_again(apart: Apart, epochs: Sequence[Epoch]) -> bool:
    """Whether all of these epochs hold the same rows and labels, in pairs that labels drawn anew would not give."""
    if not epochs:
        return False
    first, bits = epochs[0], 0.0
    for epoch in epochs[1:]:
        if any(Counter(first.column(path)) != Counter(epoch.column(path)) for path in (apart.inputs, apart.labels)):
            return False
        known = dict(_pairs(first, apart.inputs, apart.labels))
        bits += bits_of([known[x] for x, y in _pairs(epoch, apart.inputs, apart.labels) if known[x] != y])
    return bits >= ENOUGH


def bits_of(labels: Sequence[int]) -> float:
    """By how many bits it is unlikely that labels drawn anew from these are as many of each kind."""
    rows, counts = len(labels), Counter(labels).values()
    ways = math.lgamma(rows + 1) - sum(math.lgamma(count + 1) for count in counts)
    return -(ways + sum(count * math.log(count / rows) for count in counts)) / math.log(2)


def _has_stable_copy(first: Epoch, second: Epoch, x: str, y: str) -> bool:
    """Whether another leaf holds the same values in the same pairs: then this one gives each row those of others, as
    negatives are drawn."""
    values = Counter(first.column(y))
    return any(
        Counter(first.column(other)) == values and Counter(_pairs(first, x, other)) == Counter(_pairs(second, x, other))
        for other in first.leaves
        if other not in (x, y) and other in second.leaves
    )


def _pairs(epoch: Epoch, x: str, y: str) -> zip[tuple[int, int]]:
    return zip(epoch.column(x), epoch.column(y), strict=False)


def _at(place: int):  # type: ignore[no-untyped-def]
    return lambda pair: pair[place]


def _changed(mine: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int:
    known = dict(other)
    return sum(known.get(x) != y for x, y in mine)


def alike(reading: Reading, epochs: Sequence[Epoch]) -> int:
    """The number of epochs, where all came in one order although an order was drawn for each, and all draws were
    equal; else 0."""
    if len(epochs) < 2 or not epochs[0].draws or any(epoch.draws != epochs[0].draws for epoch in epochs):
        return 0
    return len(epochs) if in_one_order(reading, epochs) else 0


def in_one_order(reading: Reading, epochs: Sequence[Epoch]) -> bool:
    """Whether the epochs came in one and the same order, which is not that of the data set."""
    if len(epochs) < 2:
        return False
    if all(epoch.order is not None for epoch in epochs):
        enough = epochs[0].rows >= LEAST_ROWS or reading.passes[0].rows >= LEAST_ROWS
        return enough and not epochs[0].ascending and len({epoch.order for epoch in epochs}) == 1
    name = reading.identity
    if not name or any(name not in epoch.leaves for epoch in epochs):
        return False
    columns = {epoch.column(name) for epoch in epochs}
    return len(columns) == 1 and len(set(epochs[0].column(name))) >= LEAST_ROWS


def kept_by_cycle(passes: Sequence[Pass]) -> Pass | None:
    """A shuffled pass that ``itertools.cycle`` gives again and again, and has given again."""
    return next((p for p in passes if p.given_again and not p.ascending and p.rows >= LEAST_ROWS), None)


def repeats(reading: Reading) -> int:
    """How often each batch comes in a row, where all come equally often and more than once; else 0."""
    batches = reading.epochs[0].batches if reading.epochs else []
    runs = [len(list(group)) for _, group in itertools.groupby(batches, key=_whole)]
    whole = runs[:-1]
    return whole[0] if len(runs) > 2 and len(set(whole)) == 1 and 1 < whole[0] >= runs[-1] else 0


def one_batch(reading: Reading) -> int:
    """The number of batches read, where all hold the same rows; else 0."""
    batches = reading.epochs[0].batches if reading.epochs else []
    name = reading.identity
    if len(batches) < SAME_BATCHES or not name or any(name not in batch for batch in batches):
        return 0
    same = len({frozenset(Counter(batch[name].digests).items()) for batch in batches}) == 1
    return len(batches) if same else 0


@dataclass(frozen=True, slots=True)
class Sorted:
    """Labels that come one after the other."""

    leaf: str
    batches: int
    alone: int
    """Batches of one label."""
    labels: int


def one_label_a_batch(epochs: Sequence[Epoch]) -> Sorted | None:
    """A leaf of labels that comes in blocks, each longer than a batch, in an order that nothing drew."""
    if not epochs or any(epoch.draws for epoch in epochs) or len(epochs[0].batches) < 3:
        return None
    epoch = epochs[0]
    for name in epoch.leaves:
        if not epoch.batches[0][name].is_label or min(sizes(epoch.batches[:-1])) < LABEL_ROWS:
            continue
        column = epoch.column(name)
        labels, blocks = len(set(column)), len([1 for _ in itertools.groupby(column)])
        alone = sum(len(set(batch[name].digests)) == 1 for batch in epoch.batches)
        if 1 < labels == blocks and alone > labels and 2 * alone >= len(epoch.batches):
            return Sorted(name, len(epoch.batches), alone, labels)
    return None


def leaves_alike(reading: Reading) -> tuple[str, str, str] | None:
    """Two of three leaves of one shape that are equal in every row, and the third."""
    epoch = reading.epochs[0] if reading.epochs else Epoch()
    if not epoch.batches:
        return None
    first = epoch.batches[0]
    floating = [name for name in epoch.leaves if first[name].floating and first[name].elements > 1]
    if len(floating) != 3 or len({(first[name].shape, first[name].dtype) for name in floating}) > 1:
        return None
    columns = {name: epoch.column(name) for name in floating}
    for a, b in itertools.combinations(floating, 2):
        third = next(name for name in floating if name not in (a, b))
        if columns[a] == columns[b] != columns[third] and len(set(columns[a])) > 1:
            return a, b, third
    return None


def _whole(batch: Batch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, leaf.digests) for name, leaf in batch.items())


def some_row_twice(reading: Reading) -> bool:
    """Whether any row comes a second time."""
    name = reading.identity
    rows = [row for epoch in reading.epochs if name in epoch.leaves for row in epoch.column(name)] if name else []
    return len(set(rows)) < len(rows)
