"""Items of a data set: fetched again, by worker processes too."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.orders import line_of
from pytest_trainloop.checks.state.data_order.reading import MOST_ROWS, Draws, order_of, read
from pytest_trainloop.checks.state.data_order.rows import array_of, digest
from pytest_trainloop.checks.state.data_order.streams import ReachableObjects, first_line
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.tracing.statements import loop_of
from pytest_trainloop.runs.process_state import preserved, seed_all

if TYPE_CHECKING:
    from collections.abc import Iterator

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
