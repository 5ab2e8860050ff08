"""Items of a data set, and what a collate function makes of them.

A data set that gives an input and a label as one item says that they belong together. Labels may be changed on purpose.
What renames them (``1 - y``, the renumbered classes of an episode) is a function of an item's own label, entry by
entry, and no order. What draws them at random (label noise) leaves the labels of a batch as they were in number only by
chance (``unlikely``).
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_trainloop.checks.state.data_order.arrivals import is_target
from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.orders import ENOUGH, line_of, unlikely
from pytest_trainloop.checks.state.data_order.rows import array_of, digest, values_of
from pytest_trainloop.checks.state.data_order.streams import ReachableObjects
from pytest_trainloop.instruments.tracing import statements
from pytest_trainloop.runs.process_state import seed_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pytest_trainloop.checks.state.data_order.streams import Stream, Streams
    from pytest_trainloop.core.finding import Finding

SORTING = frozenset({"sorted", "sort", "argsort", "lexsort"})

SHIFTS = (-2, -1, 1, 2)
"""Positions by which a collate function may shift the labels of a row."""


def some_batches(loader: Any, most: int = 16) -> Iterator[list[Any]]:
    """The indices of some batches, over several epochs where one has fewer."""
    for _ in range(most if loader.batch_sampler is not None else 0):
        for indices in itertools.islice(loader.batch_sampler, most):
            if not isinstance(indices, (list, tuple)):
                return
            yield list(indices)[:64]
            most -= 1
        if most <= 0:
            return


class _Column:
    """The labels that a batch holds for its rows, with the one that each row's item has (``own``) and those of all
    items. They are whole, or cut: sequences of which some entries may be left out."""

    def __init__(self, own: list[Any], given: list[Any], items: list[Any], pads: Collection[int], *, cut: bool) -> None:
        self.own, self.given, self.items, self.pads, self.cut = own, given, items, pads, cut
        if not cut:
            digests = ([digest(value, pads) for value in values] for values in (own, given, items))
            self._own, self._given, self._items = digests

    def changed(self) -> list[int]:
        """The rows that do not hold the label of their own item."""
        if not self.cut:
            return [row for row, mine in enumerate(self._own) if mine != self._given[row]]
        return min((self._disagreeing(left) for left in (False, True)), key=len)

    def same_labels(self) -> bool:
        """Whether the batch holds the labels of its items, each as often; of cut ones, whether each row agrees with an
        item of its own, and the labels are not shifted ones of its own item."""
        if not self.cut:
            return Counter(self._given) == Counter(self._items)
        if any(not self._disagreeing(left, shift) for left in (False, True) for shift in SHIFTS):
            return False
        return any(self._has_order(left) for left in (False, True))

    def bits(self) -> float:
        """By how many bits it is unlikely that labels drawn at random give such a batch."""
        if not self.cut:
            return unlikely([self._own[row] for row in self.changed()])
        entries = Counter(entry for one in self.items for entry in one.tolist())
        equal = sum((count / entries.total()) ** 2 for count in entries.values())
        kept = sum(int(self._kept(self.given[row]).sum()) for row in self.changed())
        return max(0.0, -kept * math.log2(equal) - math.lgamma(len(self.given) + 1) / math.log(2))

    def renamed(self) -> bool:
        """Whether the labels are a function of each row's own, entry by entry, that keeps different ones different."""
        named, names = dict[Any, Any](), dict[Any, Any]()
        for mine, now in zip(self.own, self.given, strict=True):
            left, right = _entries(mine), _entries(now)
            if left is None or right is None:
                return False
            for one, other in zip(left, right, strict=False):
                if other in self.pads and other != one:
                    continue
                if named.setdefault(one, other) != other or names.setdefault(other, one) != one:
                    return False  # two names for one label, or one name for two
        return True

    def some_label_twice(self) -> bool:
        entries = [entry for one in self.own for entry in _entries(one) or ()]
        return len(set(entries)) < len(entries)

    def _kept(self, now: Any) -> Any:
        return ~np.isin(now, [pad for pad in self.pads if pad < 0])

    def _disagreeing(self, left: bool, shift: int = 0) -> list[int]:
        return [row for row, now in enumerate(self.given) if not self._agrees(now, self.own[row], left, shift)]

    def _agrees(self, now: Any, mine: Any, left: bool, shift: int = 0) -> bool:
        """Whether a row holds these labels wherever it holds any: from its start on, or up to its end."""
        if left:
            now, mine = now[::-1], mine[::-1]
        at = np.flatnonzero(self._kept(now))
        beyond = (at + shift >= len(mine)) | (at + shift < 0)
        inner = at[~beyond]
        padding = np.isin(now[at[beyond]], list(self.pads))
        return bool((now[inner] == mine[inner + shift]).all() and padding.all())

    def _has_order(self, left: bool) -> bool:
        """Whether the items can be put into an order in which every row agrees with one."""
        fits = [[i for i, item in enumerate(self.items) if self._agrees(now, item, left)] for now in self.given]
        row_of = dict[int, int]()

        def place(row: int, tried: set[int]) -> bool:
            for item in fits[row]:
                if item not in tried:
                    tried.add(item)
                    if item not in row_of or place(row_of[item], tried):
                        row_of[item] = row
                        return True
            return False

        return all(place(row, set()) for row in range(len(fits)))


def collated(stream: Stream) -> Iterator[Finding]:
    """Two fields of the items whose values are all in the batches that are collated of them, in other pairs.

    A data set that gives an input and a label as one item says that they belong together. Only the first of some
    batches is collated where each item keeps its label in it.
    """
    source, collate = stream.source, getattr(stream.now.of, "collate_fn", None)
    at, rows, changed, bits, cut = stream.with_loader(_collation_mismatch) or (None, 0, 0, 0.0, False)
    if at is None:
        return
    own = of_project(collate)
    sure = bits >= ENOUGH and source.as_trained and is_target(stream.evidence, at[1])
    sorting = bool(ReachableObjects.by(("collate_fn", collate)).names & SORTING)
    facts = {"inputs": at[0], "labels": at[1], "rows": rows, "changed": changed, "cut": cut, "sorting": sorting}
    facts |= {"function": name_of(own), "stream": source.name}
    facts |= {
        "change": statements.sorting(line_of(own)) or line_of(own),
        "kinds": ("input",) * 2,
        "level": "fault" if sure else "advice",
    }
    yield found("labels_apart", source, at, "collated", **facts)


def _collation_mismatch(loader: Any, streams: Streams) -> tuple[tuple[str, str] | None, int, int, float, bool] | None:
    at, rows, changed, bits, cut, renamed = None, 0, 0, 0.0, False, False
    seed_all(streams.loop.seed)
    for indices in some_batches(loader):
        made = of_items(loader, indices, least=2)
        if made is None:
            return None
        items, batch = made
        columns = dict(_columns(items, values_of(batch), streams.pads))
        at = at or next((key for key, column in columns.items() if len(column.changed()) > 1), None)
        if at is None or at not in columns:
            return None
        column = columns[at]
        if rows == 0:
            rows, changed, cut = len(items), len(column.changed()), column.cut
        if len(column.changed()) > 1:
            named = column.renamed()
            renamed = renamed or (named and column.some_label_twice())
            bits += 0.0 if named else column.bits()
        if bits >= ENOUGH:
            break
    return None if renamed and not bits else (at, rows, changed, bits, cut)


def _columns(
    items: Sequence[Any], batch: dict[str, Any], pads: Collection[int]
) -> Iterator[tuple[tuple[str, str], _Column]]:
    """The labels of a batch that are those of its items in some order, by the paths of inputs and labels.

    None where another leaf gives each row its own: then this one gives it those of others, as negatives are drawn.
    """
    for inputs, labels in itertools.permutations(values_of(items).values(), 2):
        rows = [digest(value, pads) for value in inputs]
        few = len({digest(value, pads) for value in labels}) < 2 or len(set(rows)) < len(rows)
        if few or _nbytes(inputs) < _nbytes(labels):
            continue
        label_of, known = dict(zip(rows, labels, strict=True)), dict[tuple[str, str], _Column]()
        for x, leaf in batch.items():
            order = [digest(value, pads) for value in leaf]
            for y in batch if Counter(order) == Counter(rows) else ():
                column = _column([label_of[row] for row in order], list(batch[y]), list(labels), pads)
                if y != x and column is not None:
                    known[x, y] = column
        if all(column.changed() for column in known.values()):
            yield from known.items()


def _column(own: list[Any], given: list[Any], items: list[Any], pads: Collection[int]) -> _Column | None:
    whole = _Column(own, given, items, pads, cut=False)
    if whole.same_labels():
        return whole
    arrays: list[list[Any]] = [[array_of(value) for value in values] for values in (own, given, items)]
    if any(one is None or one.ndim != 1 or one.dtype.kind not in "iu" for values in arrays for one in values):
        return None
    cut = _Column(arrays[0], arrays[1], arrays[2], pads, cut=True)
    return cut if not cut.changed() or cut.same_labels() else None


def _nbytes(values: Sequence[Any]) -> int:
    return sum(8 if array is None else array.nbytes for array in map(array_of, values))


def _entries(value: Any) -> list[Any] | None:
    """The entries of a label that may have another name: whole numbers, or one word."""
    if isinstance(value, str):
        return [value]
    array = array_of(value)
    return None if array is None or array.dtype.kind not in "iub" else array.flatten().tolist()


def of_items(loader: Any, indices: Any, *, least: int) -> tuple[list[Any], Any] | None:
    """The items of a batch, and what the collate function makes of a copy of them; None where these are fewer than
    ``least``, or have no fields."""
    items = [loader.dataset[index] for index in indices]
    if len(items) < least or not isinstance(items[0], (tuple, dict)):
        return None
    return items, loader.collate_fn(copy.deepcopy(items))


def name_of(own: Any) -> str:
    """The name of a function, or of the class of an object that is called."""
    return str(getattr(own, "__name__", type(own).__name__))


def of_project(collate: Any) -> Any:
    """The collate function of the project that a library's object calls, as the Trainer of transformers wraps it."""
    if isinstance(collate, functools.partial):
        return of_project(collate.func)
    if line_of(collate) or inspect.isroutine(collate) or not hasattr(collate, "__dict__"):
        return collate
    held = (one.func if isinstance(one, functools.partial) else one for one in vars(collate).values())
    return next((one for one in held if callable(one) and line_of(one)), collate)
