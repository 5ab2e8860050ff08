"""Items of a data set: fetched again, by worker processes too, and compared with what a collate function makes of them.

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
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.orders import ENOUGH, is_target, line_of, unlikely
from pytest_trainloop.checks.state.data_order.reading import (
    MOST_ROWS,
    Draws,
    array_of,
    digest,
    order_of,
    read,
    values_of,
)
from pytest_trainloop.checks.state.data_order.streams import ReachableObjects, first_line
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.tracing.statements import loop_of
from pytest_trainloop.runs.process_state import preserved, seed_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pytest_trainloop.checks.state.data_order.streams import Stream, Streams
    from pytest_trainloop.core.finding import Finding

MOST_BYTES = 1 << 28
"""Bytes of stored data that are copied, at most."""

DRAWN = 9
"""Random states under which an item is fetched: an odd number, after which an item is not as before that each fetch
turns around."""

NOISE = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "normal", "bernoulli", "randperm", "uniform_",
                   "normal_"})  # fmt: skip
"""What torch augments with."""

Copy: TypeAlias = tuple[str, Any, Any]
"""The path of what is stored, the object and a copy of it."""

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


def some_indices(loader: Any, most: int) -> list[Any]:
    """The first indices that the loader's sampler gives."""
    if loader.batch_sampler is None:
        return list(itertools.islice(iter(loader.sampler), most))
    first: Any = next(iter(loader.batch_sampler), [])
    return list(first)[:most] if isinstance(first, (list, tuple)) else []


def only_iterates(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__")


# The indices


def weights_per_class(stream: Stream) -> Iterator[Finding]:
    """A sampler with a weight for each label of the stored ones, and not for each row, draws the first rows only; with
    the weights of the rows' labels it draws others. Rows without a label have a mark among the labels (odd:
    one_labelled_row_of_each_class).
    """

    def work(loader: Any, _streams: Streams) -> dict[str, Any] | None:
        sampler, rows = order_of(loader), len(loader.dataset)
        weights = sampler.weights if isinstance(sampler, WeightedRandomSampler) else ()
        if not 1 < len(weights) < rows or sampler.num_samples <= len(weights):
            return None
        for path, value in ReachableObjects.by(("dataset", loader.dataset)).stored:
            labels = array_of(value)
            if labels is None or labels.shape != (rows,) or labels.dtype.kind not in "iu":
                continue
            kinds, numbers = np.unique(labels, return_inverse=True)
            if len(kinds) != len(weights):
                continue
            drawn = set(sampler)
            sampler.weights = torch.as_tensor(weights)[torch.as_tensor(numbers)]
            facts = {"weights": len(weights), "rows": rows, "drawn": len(drawn), "samples": sampler.num_samples}
            return {**facts, "labels": path, "others": len(set(sampler))}
        return None

    facts = stream.with_loader(work)
    if facts is not None and facts["others"] > facts["weights"]:
        yield found("weights_per_class", stream.source, ("WeightedRandomSampler",), **facts)


# One item, fetched again


def changed_in_place(stream: Stream) -> Iterator[Finding]:
    """An item that is another one after further fetches, under one random state or several (a mask may be drawn in each
    fetch), and what it was with the stored tensors and arrays put back.

    What fetching changes besides is no fault: a counter of one entry, or statistics that all items are made with, so
    that another item is another one too.
    """
    changed = stream.with_loader(_changed)
    if changed is not None:
        (index, stored, equal), dataset = changed, stream.now.of.dataset
        facts = {"index": index, "stored": some(stored), "dataset": type(dataset).__name__}
        variant, change = "" if equal else "drawn", loop_of(line_of(getattr(type(dataset), "__getitem__", None)))
        yield found("changed_in_place", stream.source, stored[:2], variant, change=change, **facts)


def _changed(loader: Any, streams: Streams) -> tuple[Any, list[str], bool] | None:
    """The index of such an item, what is stored that changed, and whether it changes under one random state too."""
    dataset, seed, indices = loader.dataset, streams.loop.seed, some_indices(loader, 3)
    before = _copies(dataset)
    for draw in range(DRAWN if indices and before else 0):
        _fetched(dataset, indices[draw % len(indices)], seed + draw)
    if not any(_entries_changed(one) for one in before):
        return None
    for index, other in itertools.pairwise([*indices, *indices[:1]]):
        if index == other:
            continue
        _put_back(before)
        others, first = [_fetched(dataset, other, seed)], _fetched(dataset, index, seed)
        _put_back(before)
        for draw in range(DRAWN):
            _fetched(dataset, index, seed + 1 + draw)
        written = [one for one in before if _entries_changed(one) > 1]
        last = _fetched(dataset, index, seed)
        others.append(_fetched(dataset, other, seed))
        _put_back(before)
        again = [_fetched(dataset, index, seed) for _ in range(3)]
        stored = [one[0] for one in written if _adds_up(dataset, index, one, seed)]
        _put_back(before)
        if stored and last != first == again[0] and others[0] == others[1]:
            return index, stored, again[0] != again[1] != again[2]
    return None


def _adds_up(dataset: Any, index: Any, one: Copy, seed: int) -> bool:
    """Whether a fetch leaves another content in a stored tensor than it finds, and than it leaves in the original one.

    A cache is left as it was found (odd: noise_cached); a buffer, or the last view of an item, holds what the last
    fetch alone leaves (odd: last_view_kept).
    """
    value = one[1]
    _put_back([one])
    before = digest(value)
    for draw in range(DRAWN):
        _fetched(dataset, index, seed + draw)
        left, kept = digest(value), _copy(value)
        _put_back([one])
        _fetched(dataset, index, seed + draw)
        if draw > 0 and left not in (before, digest(value)):
            return True
        _put_back([("", value, kept)])
        before = left
    return False


def _fetched(dataset: Any, index: Any, seed: int) -> int:
    seed_all(seed)
    return digest(dataset[index])


def _copies(dataset: Any) -> list[Copy]:
    room, copies = MOST_BYTES, list[Copy]()
    for path, value in ReachableObjects.by(("dataset", dataset)).stored:
        if isinstance(value, np.ndarray):
            writable = value.flags.writeable and value.dtype != object
        else:
            writable = isinstance(value, torch.Tensor) and value.layout is torch.strided
            writable = writable and not value.requires_grad and not value.is_inference()
        if writable and value.nbytes <= room:
            room -= value.nbytes
            copies.append((path, value, _copy(value)))
    return copies


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _entries_changed(one: Copy) -> int:
    return int((one[1] != one[2]).sum())


def _put_back(copies: list[Copy]) -> None:
    for _, value, kept in copies:
        value[...] = kept


def one_noise_for_all(stream: Stream) -> Iterator[Finding]:
    """Two items, each fetched twice, draw the same numbers of torch."""

    def work(loader: Any, _streams: Streams) -> list[list[tuple[str, int]]]:
        indices, drawn = some_indices(loader, 2), list[list[tuple[str, int]]]()
        for index in (*indices, *indices) if len(indices) == 2 else ():
            with Draws(NOISE) as draws:
                loader.dataset[index]
            drawn.append(draws.seen)
        return drawn

    drawn = stream.with_loader(work)
    if drawn and drawn[0] and all(one == drawn[0] for one in drawn):
        dataset = stream.now.of.dataset
        facts: dict[str, Any] = {"draws": len(drawn[0]), "dataset": type(dataset).__name__, "level": "advice"}
        change = line_of(getattr(type(dataset), "__getitem__", None))
        yield found("one_noise_for_all", stream.source, (f"{drawn[0][0][0]}()",), change=change, **facts)


# By worker processes


def duplicated(stream: Stream) -> Iterator[Finding]:
    """The loader gives as many times the rows that were read without workers as it has workers."""
    k, first, name = stream.source.of.num_workers, stream.reading.epochs[0], stream.reading.identity
    if k < 2 or not first.complete or k * first.rows > MOST_ROWS:
        return

    def work(loader: Any, streams: Streams) -> Counter[int] | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more workers than cores
            together = read(lambda: loader, axis=streams.axis, pads=streams.pads, epochs=1)
        if together.raised is not None:
            raise _not_started(together.raised)
        epoch = together.epochs[0]
        return Counter(epoch.column(name)) if epoch.complete and name in epoch.leaves else None

    alone = Counter(first.column(name))
    if stream.with_loader(work) == Counter({row: k * n for row, n in alone.items()}):
        dataset = stream.now.of.dataset
        facts = {"workers": k, "rows": first.rows, "all_rows": k * first.rows, "dataset": type(dataset).__name__}
        change = loop_of(line_of(getattr(type(dataset), "__iter__", None)))
        culprit = f"{type(dataset).__name__}.__iter__"
        yield found("workers_duplicate", stream.source, (culprit,), change=change, **facts)


def shared_randomness(stream: Stream) -> Iterator[Finding]:
    """Fetch one item four times by two workers: each worker's second differs from its first, and both workers' are the
    same. Then again, as the next epoch does."""
    fetched = stream.with_loader(_fetched_by_workers)
    if not fetched:
        return
    generators, (a, b, c, d), again = fetched
    init, generator = stream.source.of.worker_init_fn, next(iter(generators), "")
    seeder = "" if init is None else getattr(init, "__name__", type(init).__name__)
    across = stream.source.of.num_workers > 1 and (a, c) == (b, d)
    if a != c and b != d and (across or again == [a, b, c, d]):
        facts = {"seeder": f"{seeder}()" if seeder else "the data set", "generator": generator}
        facts |= {"level": "fault" if across else "advice"}
        culprit, variant = seeder or generator or "worker_init_fn", "generator" if generator else ""
        yield found("workers_share_randomness", stream.source, (culprit,), variant if across else "epochs", **facts)


def _fetched_by_workers(loader: Any, _streams: Streams) -> tuple[list[str], list[int], list[int]] | None:
    index = next(iter(some_indices(loader, 1)), None)
    generators = ReachableObjects.by(("dataset", loader.dataset)).generators
    if index is None or not (generators or _draws(loader.dataset, index)):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probe = DataLoader(
            loader.dataset,
            batch_sampler=[[index]] * 4,
            num_workers=2,
            collate_fn=_as_they_are,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
        )
        try:
            epochs = [[digest(items) for items in probe] for _ in range(2)]
        except Exception as error:  # of the project's data set in a worker
            reraise_ours(error)
            raise _not_started(error) from error
        finally:
            del probe
    return generators, epochs[0], epochs[1]


def _as_they_are(items: Any) -> Any:
    return items


def _draws(dataset: Any, index: Any) -> bool:
    """Whether an item depends on the generators of the process, and on nothing that goes on from call to call."""
    with preserved():
        fetched = [_fetched(dataset, index, seed) for seed in (1, 1, 2, 3)]
    return fetched[0] == fetched[1] and len(set(fetched)) > 1


def _not_started(error: BaseException) -> CannotDecide:
    return CannotDecide(
        f"workers cannot be started here ({first_line(error, 120)}): run where processes can be forked, or give what "
        "the loader holds at the top of a module"
    )


# Before and after the collate function


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
    facts |= {"change": line_of(own), "kinds": ("input",) * 2, "level": "fault" if sure else "advice"}
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
