"""Inputs and their labels: in two epochs, and before and after a collate function; rows that never come.

Labels may be changed on purpose. What renames them (``1 - y``, the classes of an episode numbered anew) is a function
of an item's own label, entry by entry, and no order. What draws them anew (label noise) leaves the labels of a batch
as they were in number only by chance. With ``m`` changed rows, of which ``c_i`` have label ``i``, drawing each from
these labels gives the same numbers with probability ``m! prod((c_i / m)^c_i / c_i!)``; epochs and batches are read
until the product of these is below ``2^-ENOUGH``. Of labels that are cut to the length of another row's input the same
is asked of their entries: of the ``n!`` orders of a batch's rows, each agrees by chance with probability ``q^k``, where
``q`` is the chance that two entries are equal and ``k`` the number of entries that are left in rows that disagree with
their own item.
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
import torch

from pytest_trainloop import nested
from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.items import line_of, some_batches
from pytest_trainloop.checks.state.data_order.streams import (
    Epoch,
    Held,
    Stream,
    Streams,
    array_of,
    digest,
    rows_of,
    values_of,
)
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_names import LOSSES, SIGN_LOSSES
from pytest_trainloop.runs.process_state import seed_all
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import Lineage, name_of, watched
from pytest_trainloop.tracing.provenance_queries import ancestors
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pytest_trainloop.checks.state.data_order.streams import Leaf
    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.provenance import Node

ENOUGH = 10.0
"""Bits: of 1024 streams that draw some labels anew fewer than one holds as many of each kind every time."""

MORE = 5
"""How many times as many epochs are read where two hold the same labels in other pairs."""

MOST_BYTES = 1 << 28
"""Bytes of one stored tensor that are read, at most."""

SORTING = frozenset({"sorted", "sort", "argsort", "lexsort"})

SHIFTS = (-2, -1, 1, 2)
"""Positions by which a collate function may shift the labels of a row."""

STEPS = 2
"""Optimizer steps for which it is looked whether a leaf is a target."""

MOST_NODES = 20_000
"""Calls before a loss function in which the leaf is looked for."""

WITH_TARGETS = LOSSES - SIGN_LOSSES - {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
"""Losses with a target for each row: others compare rows that are drawn for each other anew."""

_FILLS = frozenset({"pad", "masked_fill", "setitem", "one_hot"})
"""Operations that give some entries another value, or add some: the others are those of the first argument."""


# In two epochs


def of_epochs(stream: Stream) -> Iterator[Finding]:
    """Two leaves that hold the same rows in two epochs, and not the same pairs of them."""
    x, y, changed = _apart(stream.reading.identity, stream.epochs)
    if not y or not (_by_no_chance(x, y, stream.epochs) or _by_no_chance(x, y, _further_epochs(stream))):
        return
    first, source = stream.epochs[0], stream.source
    inputs, labels, rows = _pair_stored(stream.held, first, x, y)
    sure = rows > 0 and source.as_trained and _is_target(stream.evidence, y)
    facts: dict[str, Any] = {"inputs": x, "labels": y, "rows": first.rows, "changed": changed, "stream": source.name}
    facts |= {"kinds": ("input",) * 2, "stored": rows, "stored_inputs": inputs, "stored_labels": labels}
    yield found("labels_apart", source, (x, y), level="fault" if sure else "advice", **facts)


def _apart(x: str, epochs: Sequence[Epoch]) -> tuple[str, str, int]:
    for first, second in itertools.islice(itertools.combinations(epochs, 2), 8):
        leaves = [path for path in first.leaves if path in second.leaves]
        for y in leaves if x in leaves else ():
            whole = [batch[y].digests for batch in first.batches[:-1]]
            numbers_rows = (
                len(whole) > 1 and len({frozenset(w) for w in whole}) == 1 and len({*whole[0]}) == len(whole[0])
            )
            if y == x or numbers_rows or len(set(first.column(y))) < 2:
                continue
            mine, other = _pairs(first, x, y), _pairs(second, x, y)
            if mine == other or any(Counter(p[i] for p in mine) != Counter(p[i] for p in other) for i in (0, 1)):
                continue
            # another leaf may give each row its own: then this one gives it those of others, as negatives are drawn
            values = Counter(first.column(y))
            own = (z for z in leaves if z not in (x, y) and Counter(first.column(z)) == values)
            if not any(_pairs(first, x, z) == _pairs(second, x, z) for z in own):
                known = dict(other.elements())
                return x, y, sum(known.get(row) != label for row, label in mine.elements())
    return x, "", 0


def _pairs(epoch: Epoch, x: str, y: str) -> Counter[tuple[int, int]]:
    return Counter(zip(epoch.column(x), epoch.column(y), strict=True))


def _by_no_chance(x: str, y: str, epochs: Sequence[Epoch]) -> bool:
    """Whether all of these epochs hold the same rows and labels, in pairs that labels drawn anew would not give."""
    bits = 0.0
    for epoch in epochs[1:]:
        if any(Counter(epochs[0].column(path)) != Counter(epoch.column(path)) for path in (x, y)):
            return False
        known = dict(zip(epochs[0].column(x), epochs[0].column(y), strict=True))
        pairs = zip(epoch.column(x), epoch.column(y), strict=True)
        bits += _bits([known[row] for row, label in pairs if known[row] != label])
    return bits >= ENOUGH


def _bits(labels: Sequence[int]) -> float:
    """By how many bits it is unlikely that labels drawn anew from these are as many of each kind."""
    rows, counts = len(labels), Counter(labels).values()
    ways = math.lgamma(rows + 1) - sum(math.lgamma(count + 1) for count in counts)
    return -(ways + sum(count * math.log(count / rows) for count in counts)) / math.log(2)


def _further_epochs(stream: Stream) -> list[Epoch]:
    streams, source = stream.fresh()
    more = streams.read(source, times=MORE)
    return more.cycles() if more.raised is None else []


def leaves_alike(stream: Stream) -> Iterator[Finding]:
    """Two of three leaves of one shape that are equal in every row, and the third."""
    epoch = stream.reading.epochs[0]
    first = epoch.batches[0]
    floating = [name for name in epoch.leaves if first[name].floating and first[name].elements > 1]
    if len(floating) != 3 or len({(first[name].shape, first[name].dtype) for name in floating}) > 1:
        return
    columns = {name: epoch.column(name) for name in floating}
    for a, b in itertools.combinations(floating, 2):
        third = next(name for name in floating if name not in (a, b))
        if columns[a] == columns[b] != columns[third] and len(set(columns[a])) > 1:
            facts: dict[str, Any] = {"a": a, "b": b, "third": third, "rows": epoch.rows}
            yield found("leaves_alike", stream.source, (a, b), level="advice", kinds=("input",) * 2, **facts)
            return


# What the stream's own code stores


def _pair_stored(held: Held, epoch: Epoch, x: str, y: str) -> tuple[str, str, int]:
    """Where a tensor holds the inputs and one of the same length the labels, so that each row has a label of its own,
    and their length; 0 where there are none."""
    inputs, labels = set(epoch.column(x)), Counter(epoch.column(y))
    stored = [(path, value) for path, value in (*held.stored, *held.records) if _length(value) >= epoch.rows]
    rows_at = {
        path: _length(value) for path, value in stored if inputs <= set(_stored_rows(value, epoch.batches[0][x]))
    }
    for path, value in stored if rows_at else ():
        same = next((p for p, rows in rows_at.items() if rows == _length(value) and p != path), "")
        if same and not labels - Counter(_stored_rows(value, epoch.batches[0][y])):
            return same, path, _length(value)
    return "", "", 0


def rows_never_drawn(stream: Stream) -> Iterator[Finding]:
    """A stored tensor that holds all rows seen, and at least twice as many that were never drawn in five times as many
    draws as it has rows."""
    x, epoch = stream.reading.identity, Epoch([batch for one in stream.reading.epochs for batch in one.batches])
    if not stream.source.trains or x not in epoch.leaves or epoch.batches[0][x].elements < 2:
        return
    seen, held = set(epoch.column(x)), stream.held
    for path, value in (*held.stored, *held.records):
        rows = _length(value)
        there = set(_stored_rows(value, epoch.batches[0][x])) if 3 * len(seen) <= rows <= epoch.rows / 5 else set[int]()
        if seen <= there and len(there) >= 3 * len(seen):
            facts: dict[str, Any] = {"missing": rows - len(seen), "rows": rows, "draws": epoch.rows, "drawn": len(seen)}
            yield found("rows_never_drawn", stream.source, (path,), level="advice", **facts)
            return


def _length(value: Any) -> int:
    """Rows of what is stored."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.shape[0]) if value.ndim else 0
    return len(value)


def _stored_rows(value: Any, like: Leaf) -> tuple[int, ...]:
    """The digests of stored rows, in the dtype in which a batch holds them."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.nbytes > MOST_BYTES:
        return ()
    try:
        leaf = next(iter(rows_of([value]).values()), None) if isinstance(value, torch.Tensor) else None
        if leaf is not None and leaf.dtype == like.dtype:
            return leaf.digests
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        if array.dtype.kind in "fiub":
            leaf = next(iter(rows_of([array.astype(like.dtype)]).values()), leaf)
        return tuple(map(digest, value)) if leaf is None else leaf.digests
    except (TypeError, ValueError, RuntimeError, StopIteration) as error:
        reraise_raised(error)
        return ()


# Whether a leaf is a target


class Targets(WatchingMode):
    """Whether a leaf is given to a loss function as its target, as it is or cast, moved, cut or padded, and no
    prediction that such a loss gets is made of it: what a model is conditioned on is no target."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.compared = self.predicts = False
        self._lineage = Lineage()

    def take(self, _number: int, item: Any) -> None:
        self._lineage.forget()
        for path, leaf in nested.paths(item):
            if nested.shown(path) == self.path:
                self._lineage.adopt(leaf)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in WITH_TARGETS:
            targets, predictions = tensors_in(args[1:], kwargs), tensors_in(args[:1], kwargs.get("input"))
            with self.watch.suspended():
                if any(self._is_leaf(self._lineage.of(target)) for target in targets):
                    self.compared = True
                    made_of = (node for one in predictions for node in ancestors(self._lineage.of(one), MOST_NODES))
                    self.predicts = self.predicts or any(node.op == "batch" for node in made_of)
        full = name_of(func)
        if not watched(full):
            return super().call(name, func, args, kwargs)
        parents = self._lineage.before(full, args, kwargs)
        out = super().call(name, func, args, kwargs)
        with self.watch.suspended():
            self._lineage.note(self.watch, func, full, args, kwargs, parents, out)
        return out

    def _is_leaf(self, node: Node) -> bool:
        while node.op != "batch":
            if not (node.moves or node.op in _FILLS) or not node.parents:
                return False
            node = node.parents[0]
        return True


def _is_target(evidence: Evidence, path: str) -> bool:
    seen = Targets(path)
    how: dict[str, Any] = {"enough": lambda record: record.rounds >= STEPS, "may_raise": True}
    evidence.rerun(before_item=seen.take, contexts=seen.contexts, **how)
    return seen.compared and not seen.predicts


# Before and after the collate function


class _Column:
    """The labels that a batch holds for its rows, beside the one that each row's item has (``own``) and those of all
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
        """By how many bits it is unlikely that labels drawn anew give such a batch."""
        if not self.cut:
            return _bits([self._own[row] for row in self.changed()])
        entries = Counter(entry for one in self.items for entry in one.tolist())
        equal = sum((count / entries.total()) ** 2 for count in entries.values())
        kept = sum(int(self._kept(self.given[row]).sum()) for row in self.changed())
        return max(0.0, -kept * math.log2(equal) - math.lgamma(len(self.given) + 1) / math.log(2))

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
    at, rows, changed, bits, cut = stream.with_loader(_collated_apart) or (None, 0, 0, 0.0, False)
    if at is None:
        return
    own = _of_project(collate)
    sure = bits >= ENOUGH and source.as_trained and _is_target(stream.evidence, at[1])
    sorting = bool(Held.by(("collate_fn", collate)).names & SORTING)
    facts = {"inputs": at[0], "labels": at[1], "rows": rows, "changed": changed, "cut": cut, "sorting": sorting}
    facts |= {"function": getattr(own, "__name__", type(own).__name__), "stream": source.name}
    facts |= {"change": line_of(own), "kinds": ("input",) * 2, "level": "fault" if sure else "advice"}
    yield found("labels_apart", source, at, "collated", **facts)


def _collated_apart(loader: Any, streams: Streams) -> tuple[tuple[str, str] | None, int, int, float, bool] | None:
    at, rows, changed, bits, cut, renamed = None, 0, 0, 0.0, False, False
    seed_all(streams.loop.seed)
    for indices in some_batches(loader):
        items = [loader.dataset[index] for index in indices]
        if len(items) < 2 or not isinstance(items[0], (tuple, dict)):
            return None
        columns = dict(_columns(items, values_of(loader.collate_fn(copy.deepcopy(items))), streams.pads))
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


def _of_project(collate: Any) -> Any:
    """The collate function of the project that a library's object calls, as the Trainer of transformers wraps it."""
    if isinstance(collate, functools.partial):
        return _of_project(collate.func)
    if line_of(collate) or inspect.isroutine(collate) or not hasattr(collate, "__dict__"):
        return collate
    held = (one.func if isinstance(one, functools.partial) else one for one in vars(collate).values())
    return next((one for one in held if callable(one) and line_of(one)), collate)
