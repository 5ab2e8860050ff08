"""Items before and after they are collated: whether each keeps its own label.

A data set that gives an input and a label as one item says that they belong together. A collate function that sorts or
permutes one of the two gives every row the label of another item: each label is in the batch, and not beside its input.

Labels may be changed on purpose. What renames them (``1 - y``, the classes of an episode numbered anew) is a function
of an item's own label, entry by entry, and no order. What draws them anew (label noise) leaves the labels of a batch
as they were in number only by chance. With ``m`` changed rows, of which ``c_i`` have label ``i``, drawing each from
these labels gives the same numbers with probability ``m! prod((c_i / m)^c_i / c_i!)``; batches are collated until the
product of these is below ``2^-20``. Of labels that are cut to the length of another row's input the same is asked of
their entries: of the ``n!`` orders of a batch's rows, each agrees by chance with probability ``q^k``, where ``q`` is
the chance that two entries are equal and ``k`` the number of entries that are left in rows that disagree with their own
item.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_trainloop.checks.state.data_order.held import Held
from pytest_trainloop.checks.state.data_order.order import ENOUGH, bits_of
from pytest_trainloop.checks.state.data_order.rows import array_of, digest, values_of
from pytest_trainloop.runs.process_state import preserved, seed_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

SORTING = frozenset({"sorted", "sort", "argsort", "lexsort"})

SHIFTS = (-2, -1, 1, 2)
"""Positions by which a collate function may shift the labels of a row."""


@dataclass(frozen=True, slots=True)
class Collated:
    """Fields of items that collating pairs otherwise."""

    inputs: str
    labels: str
    rows: int
    changed: int
    sorts: bool
    """Whether the collate function names what sorts."""
    sure: bool = False
    """Whether chance and a new name for each label are ruled out."""
    cut: bool = False
    """Whether labels are cut to the length of the row that they are put into."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A label of each row of a batch, beside the one that its item has and those of all items."""

    own: list[Any]
    given: list[Any]
    items: list[Any]
    pads: Collection[int]

    def changed(self) -> list[int]:
        both = zip(self._digests(self.own), self._digests(self.given), strict=True)
        return [row for row, (mine, now) in enumerate(both) if mine != now]

    def same_labels(self) -> bool:
        """Whether the batch holds the labels of its items, each as often."""
        return Counter(self._digests(self.given)) == Counter(self._digests(self.items))

    def bits(self, changed: Sequence[int]) -> float:
        """By how many bits it is unlikely that labels drawn anew are the same in number."""
        return bits_of(self._digests([self.own[row] for row in changed]))

    def renamed(self) -> bool:
        """Whether the labels are a function of each row's own, entry by entry, that keeps them apart."""
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

    def _digests(self, values: Iterable[Any]) -> list[int]:
        return [digest(value, self.pads) for value in values]


class _Cut(_Column):
    """The same for sequences of labels of which some entries may be left out, or cut off."""

    __slots__ = ()

    def changed(self) -> list[int]:
        return min((self._disagreeing(left=left) for left in (False, True)), key=len)

    def same_labels(self) -> bool:
        """Whether each row agrees with an item of its own."""
        if any(not self._disagreeing(left=left, shift=shift) for left in (False, True) for shift in SHIFTS):
            return False
        return any(self._has_order(left=left) for left in (False, True))

    def bits(self, changed: Sequence[int]) -> float:
        entries = Counter(entry for one in self.items for entry in one.tolist())
        total = sum(entries.values())
        equal = sum((count / total) ** 2 for count in entries.values())
        kept = sum(int(self._kept(self.given[row]).sum()) for row in changed)
        return max(0.0, -kept * math.log2(equal) - math.lgamma(len(self.given) + 1) / math.log(2))

    def _kept(self, now: Any) -> Any:
        return ~np.isin(now, [pad for pad in self.pads if pad < 0])

    def _disagreeing(self, *, left: bool, shift: int = 0) -> list[int]:
        rows = enumerate(zip(self.own, self.given, strict=True))
        return [row for row, (mine, now) in rows if not self._agrees(now, mine, left=left, shift=shift)]

    def _agrees(self, now: Any, mine: Any, *, left: bool, shift: int = 0) -> bool:
        """Whether a row holds these labels wherever it holds any: from its start on, or up to its end."""
        if left:
            now, mine = now[::-1], mine[::-1]
        at = np.flatnonzero(self._kept(now))
        beyond = (at + shift >= len(mine)) | (at + shift < 0)
        inner = at[~beyond]
        padding = np.isin(now[at[beyond]], list(self.pads))
        return bool((now[inner] == mine[inner + shift]).all() and padding.all())

    def _has_order(self, *, left: bool) -> bool:
        """Whether the items can be put into an order in which every row agrees with one."""
        fits = [[i for i, item in enumerate(self.items) if self._agrees(now, item, left=left)] for now in self.given]
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


def collated_apart(loader: Any, batches: Iterable[Sequence[Any]], pads: Collection[int], seed: int) -> Collated | None:
    """Two fields of the items whose values are all in the batches that are collated of them, in other pairs.

    ``batches`` are the indices of some batches; only the first is collated where each item keeps its label in it.
    """
    found, bits, renamed = None, 0.0, False
    with preserved():
        seed_all(seed)
        for indices in batches:
            items = [loader.dataset[index] for index in indices]
            if len(items) < 2 or not isinstance(items[0], (tuple, dict)):
                return None
            columns = dict(_columns(items, values_of(loader.collate_fn(copy.deepcopy(items))), pads))
            apart = (key for key, column in columns.items() if len(column.changed()) > 1)
            at = (found.inputs, found.labels) if found is not None else next(apart, None)
            if at is None or at not in columns:
                return None
            column, changed = columns[at], columns[at].changed()
            if len(changed) > 1:
                named = column.renamed()
                renamed = renamed or (named and column.some_label_twice())
                bits += 0.0 if named else column.bits(changed)
            if found is None:
                sorts = bool(Held.by(("collate_fn", loader.collate_fn)).names & SORTING)
                found = Collated(*at, len(items), len(changed), sorts, cut=isinstance(column, _Cut))
            if bits >= ENOUGH:
                break
    if found is None or (renamed and not bits):
        return None
    return replace(found, sure=bits >= ENOUGH)


def _columns(
    items: Sequence[Any], batch: dict[str, Any], pads: Collection[int]
) -> Iterator[tuple[tuple[str, str], _Column]]:
    """The labels of a batch that are those of its items in some order, by the paths of inputs and labels.

    None where another leaf gives each row its own: then this one gives it those of others, as negatives are drawn.
    """
    fields = list(values_of(items).values())
    for inputs, labels in itertools.permutations(fields, 2):
        rows = [digest(value, pads) for value in inputs]
        kinds = {digest(value, pads) for value in labels}
        if len(set(rows)) < len(rows) or len(kinds) < 2 or _size(inputs) < _size(labels):
            continue
        label_of = dict(zip(rows, labels, strict=True))
        known = dict[tuple[str, str], _Column]()
        for x, leaf in batch.items():
            order = [digest(value, pads) for value in leaf]
            own = [label_of[row] for row in order] if Counter(order) == Counter(rows) else None
            for y in batch if own is not None else ():
                column = None if y == x or own is None else _column(own, list(batch[y]), labels, pads)
                if column is not None:
                    known[x, y] = column
        if all(column.changed() for column in known.values()):
            yield from known.items()


def _column(own: list[Any], given: list[Any], items: Sequence[Any], pads: Collection[int]) -> _Column | None:
    whole = _Column(own, given, list(items), pads)
    if whole.same_labels():
        return whole
    arrays: list[list[Any]] = [[array_of(value) for value in values] for values in (own, given, items)]
    if any(one is None or one.ndim != 1 or one.dtype.kind not in "iu" for values in arrays for one in values):
        return None
    cut = _Cut(arrays[0], arrays[1], arrays[2], pads)
    return cut if not cut.changed() or cut.same_labels() else None


def _size(values: Sequence[Any]) -> int:
    arrays = [array_of(value) for value in values]
    return sum(8 if array is None else array.nbytes for array in arrays)


def _entries(value: Any) -> list[Any] | None:
    """The entries of a label that may have another name: whole numbers, or one word."""
    if isinstance(value, str):
        return [value]
    array = array_of(value)
    return None if array is None or array.dtype.kind not in "iub" else array.flatten().tolist()
