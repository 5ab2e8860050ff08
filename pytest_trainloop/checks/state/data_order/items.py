"""What a data set gives: single items that are fetched again, by worker processes too; records that share a tensor."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from pytest_trainloop import members
from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.passes import Draws
from pytest_trainloop.checks.state.data_order.streams import MOST_ROWS, Held, digest, first_line, read
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.recording.torch_internals import writes_in_place
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.whose import reraise_ours
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.state.data_order.streams import Stream, Streams
    from pytest_trainloop.finding import Finding
    from pytest_trainloop.loop import TrainLoop

MOST_BYTES = 1 << 28
"""Bytes of stored data that are copied, at most."""

DRAWN = 8
"""Random states under which an item is fetched."""

LEAST_RECORDS = 8
"""Records that share an object, at least."""

NOISE = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "normal", "bernoulli", "randperm", "uniform_",
                   "normal_"})  # fmt: skip
"""What torch augments with."""

Copy: TypeAlias = tuple[str, Any, Any]
"""The path of what is stored, the object and a copy of it."""


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


def line_of(function: Any) -> str:
    """The line that defines a function, or what a callable object calls, if it is the project's own."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None or layer(code.co_filename) != 2 else str(place_of(code.co_filename, code.co_firstlineno))


# One item, fetched again


def changed_in_place(stream: Stream) -> Iterator[Finding]:
    """Fetch an item three times under one random state, then once more with the stored tensors and arrays put back.
    Where that changes nothing fetch it under several random states, as a mask may be drawn in each fetch.

    What fetching changes besides is no fault: a counter (one entry), or statistics that all items are made with, so
    that another item is another one too.
    """

    def work(loader: Any, streams: Streams) -> tuple[Any, list[str], str] | None:
        indices, seed = some_indices(loader, 3), streams.loop.seed
        return _changed_alike(loader.dataset, indices, seed) or _changes_add_up(loader.dataset, indices, seed)

    changed = stream.with_loader(work)
    if changed is not None:
        (index, stored, variant), dataset = changed, stream.now.of.dataset
        facts = {"index": index, "stored": some(stored), "dataset": type(dataset).__name__}
        change = line_of(getattr(type(dataset), "__getitem__", None))
        yield found("changed_in_place", stream.source, stored[:2], variant, change=change, **facts)


def _changed_alike(dataset: Any, indices: Sequence[Any], seed: int) -> tuple[Any, list[str], str] | None:
    for index, other in itertools.pairwise([*indices, *indices[:1]]):
        if index == other:
            continue
        with preserved():
            before = _copies(dataset)
            others = [_fetched(dataset, other, seed)]
            _put_back(before)
            fetched = [_fetched(dataset, index, seed) for _ in range(3)]
            changed = [(path, value, copy) for path, value, copy in before if _entries_changed(value, copy) > 1]
            others.append(_fetched(dataset, other, seed))
            _put_back(before)
            if fetched[0] == fetched[1] or fetched[1] == fetched[2] or others[0] != others[1]:
                continue
            if changed and _fetched(dataset, index, seed) == fetched[0]:
                return index, [path for path, *_ in changed], ""
    return None


def _changes_add_up(dataset: Any, indices: Sequence[Any], seed: int) -> tuple[Any, list[str], str] | None:
    """An item that goes on to change with what each fetch draws, in what is stored."""
    with preserved():
        before = _copies(dataset)
        if not before or not indices or not _written(dataset, indices[0], before, seed, least=1):
            return None
        for index, other in itertools.pairwise([*indices, *indices[:1]]):
            if index == other:
                continue
            _put_back(before)
            others, first = [_fetched(dataset, other, seed)], _fetched(dataset, index, seed)
            written = _written(dataset, index, before, seed, least=2)
            last = _fetched(dataset, index, seed)
            others.append(_fetched(dataset, other, seed))
            _put_back(before)
            again = _fetched(dataset, index, seed)
            added = [one[0] for one in written if _adds_up(dataset, index, one, seed)]
            _put_back(before)
            if added and last != first == again and others[0] == others[1]:
                return index, added, "drawn"
    return None


def _written(dataset: Any, index: Any, before: list[Copy], seed: int, *, least: int) -> list[Copy]:
    """What changes in ``least`` entries while an item is fetched under several random states; not put back."""
    _put_back(before)
    for draw in range(1, DRAWN + 1):
        _fetched(dataset, index, seed + draw)
    return [one for one in before if _entries_changed(one[1], one[2]) >= least]


def _adds_up(dataset: Any, index: Any, one: Copy, seed: int) -> bool:
    """Whether a fetch leaves another content in a stored tensor than it finds, and than it leaves in the original one.

    A cache is left as it was found (odd: noise_cached); a buffer, or the last view of an item, holds what the last
    fetch alone leaves (odd: last_view_kept).
    """
    value = one[1]
    _put_back([one])
    before = digest(value)
    for draw in range(1, DRAWN + 1):
        _fetched(dataset, index, seed + draw)
        left, kept = digest(value), _copy(value)
        _put_back([one])
        _fetched(dataset, index, seed + draw)
        if draw > 1 and left not in (before, digest(value)):
            return True
        _put_back([("", value, kept)])
        before = left
    return False


def _fetched(dataset: Any, index: Any, seed: int) -> int:
    seed_all(seed)
    return digest(dataset[index])


def _copies(dataset: Any) -> list[Copy]:
    room, copies = MOST_BYTES, list[Copy]()
    for path, value in Held.by(("dataset", dataset)).stored:
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


def _entries_changed(value: Any, copy: Any) -> int:
    return int((value != copy).sum())


def _put_back(copies: list[Copy]) -> None:
    for _, value, kept in copies:
        value[...] = kept


def one_noise_for_all(stream: Stream) -> Iterator[Finding]:
    """Two items, each fetched twice, draw the same numbers of torch."""

    def work(loader: Any, _streams: Streams) -> list[list[tuple[str, int]]]:
        indices, drawn = some_indices(loader, 2), []
        for index in (*indices, *indices) if len(indices) == 2 else ():
            with preserved(), Draws(NOISE) as draws:
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
        change = line_of(getattr(type(dataset), "__iter__", None))
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
    generators = Held.by(("dataset", loader.dataset)).generators
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


# Records


def shared_slots(held: Held, loop: TrainLoop) -> Iterator[Finding]:
    """Slots of records that hold one object which was written in place, at least once a record; no tensors of the
    model."""
    modules = loop.modules.values()
    own = {id(t) for module in modules for t in (*members.parameters(module), *members.buffers(module))}
    for path, records in held.records:
        for slot, values in _slots(list(records)).items() if len(records) >= LEAST_RECORDS else ():
            first = values[0]
            if id(first) in own or any(value is not first for value in values):
                continue
            facts: dict[str, Any] = {"path": path, "records": len(values), "written": 0, "level": "advice"}
            if isinstance(first, torch.Tensor):
                facts |= {"written": writes_in_place(first), "level": "fault"}
                if isinstance(first, torch.nn.Parameter) or facts["written"] < len(values):
                    continue
            elif not isinstance(first, np.ndarray) or not first.ndim:  # an array does not count what is written
                continue
            yield found("slots_share_tensor", "", (f"{path}[...]{slot}",), shape=str(tuple(first.shape)), **facts)


def _slots(records: Sequence[Any]) -> dict[str, list[Any]]:
    """The values of each slot of the records, which are of one kind; a bare tensor is its own slot."""
    first = records[0]
    if len({type(record) for record in records}) > 1:
        return {}
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return {"": list(records)}
    if isinstance(first, Mapping):
        keys = [key for key in first if all(key in record for record in records)]
        return {f"[{key!r}]": [record[key] for record in records] for key in keys}
    if isinstance(first, (tuple, list)):
        names, width = getattr(first, "_fields", None), min(map(len, records))
        return {f".{names[i]}" if names else f"[{i}]": [record[i] for record in records] for i in range(width)}
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        return {f".{name}": [getattr(record, name, None) for record in records] for name in names}
    return {}
