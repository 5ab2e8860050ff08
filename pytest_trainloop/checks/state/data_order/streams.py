"""The streams of batches of a loop, and what their code holds: loaders, stored rows, records."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from pytest_trainloop.adapters.training_data import training_data
from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.reading import MOST_BATCHES, Epoch, Reading, epoch_setter, read
from pytest_trainloop.checks.state.data_order.rows import PADS, Leaf, digest, rows_of
from pytest_trainloop.checks.state.data_order.splits import Assigned
from pytest_trainloop.checks.state.two_runs import line_of
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide, UserCodeError
from pytest_trainloop.core.whose import present, project_may_raise, reraise_raised
from pytest_trainloop.instruments.batches.padding import padding_ids
from pytest_trainloop.instruments.tracing.statements import loop_of
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import writes_in_place
from pytest_trainloop.runs.guard import Guard, let_go
from pytest_trainloop.runs.loader_workers import workers_ended
from pytest_trainloop.runs.process_state import SeededApart, preserved
from pytest_trainloop.runs.reachable_state.entering import Entering
from pytest_trainloop.runs.reachable_state.graph import Graph
from pytest_trainloop.runs.reachable_state.slots import Place
from pytest_trainloop.runs.reachable_state.value_kinds import is_plain, sort_of, sort_of_root
from pytest_trainloop.runs.reachable_state.walker import quiet
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

T = TypeVar("T")

DRAWN = 48
"""Batches that are asked of ``batches(n)``."""

EPOCHS = 4
"""Epochs in which the same rows are left out: one row of 50 is so by chance in one of 125,000 shuffles."""

MOST_LOADERS = 4
"""Loaders that are judged."""

MOST_OBJECTS = 20_000
"""Objects that are looked into for data."""

MOST_BYTES = 1 << 28
"""Bytes of one stored tensor that are read, at most."""

LEAST_RECORDS = 8
"""Records that share an object, at least."""

NEW_ROWS = (
    "no row comes twice in 48 batches (augmented or made on the fly); give the DataLoader itself as batches= to have "
    "its data set and sampler judged"
)
MADE = "no row comes twice in 48 batches of batches(n): they are made for each call, and have no order"
LISTED = "the batches are a list, which has no order of its own: give the DataLoader that they come from as batches="

# What is held


@dataclass(slots=True)
class ReachableObjects:
    """What functions and loaders hold, each with the path by which it was reached."""

    loaders: list[tuple[str, Any]] = field(default_factory=list)
    stored: list[tuple[str, Any]] = field(default_factory=list)
    """Tensors, arrays and lists of numbers."""
    records: list[tuple[str, Sequence[Any]]] = field(default_factory=list)
    """Lists and deques of anything else."""
    generators: list[str] = field(default_factory=list)
    cycles: int = 0
    """Iterators of ``itertools.cycle``."""
    names: set[str] = field(default_factory=set)
    """The names that the code of functions reads: globals, attributes, methods."""

    @classmethod
    def by(cls, *roots: tuple[str, Any]) -> ReachableObjects:
        """What these hold, themselves included."""
        found, graph = cls(), Graph()
        with quiet():
            for path, root in roots:
                sort = sort_of_root(root)
                if not is_plain(root) and sort not in ("opaque", "ours"):
                    named = f"<{path}>" if sort in ("function", "method", "partial") else path
                    graph.queue.append(Place(named, None, root, component=named, node=graph.node(root, named)))
            entering = Entering(graph)
            for _ in range(MOST_OBJECTS):
                if graph.queue:
                    entering.enter(graph.queue.popleft())
            for known, (_node, value) in graph.known.items():
                found._take(graph.names[known], value)
        return found

    @classmethod
    def by_fit(cls, loop: TrainLoop) -> ReachableObjects:
        return cls.by(*((name, f) for name, f in (("fit", loop.fit), ("step", loop.step)) if f is not None))

    def _take(self, path: str, value: Any) -> None:
        sort = sort_of(value)
        if isinstance(value, types.FunctionType):
            self.names |= _names(value.__code__) if sort != "ours" else set()
        elif isinstance(value, itertools.cycle):
            self.cycles += 1
        elif isinstance(value, DataLoader):
            self.loaders.append((path, value))
        elif sort in ("tensor", "array"):
            self.stored.append((path, value))
        elif sort == "generator":
            self.generators.append(path)
        elif isinstance(value, (list, collections.deque)) and value and sort != "ours":
            numbers = isinstance(value[0], (int, float, np.generic)) and not isinstance(value[0], bool)
            (self.stored if numbers else self.records).append((path, value))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


# Streams


@dataclass(frozen=True, slots=True)
class Source:
    """Where one stream of batches of a loop comes from."""

    name: str
    """As the project writes it."""
    kind: Literal["loader", "function", "iterable", "list"]
    of: Any
    """The loader, the function or the iterable."""
    given: bool = False
    """Whether it is ``batches`` itself."""
    trains: bool = True
    """Whether it was reached from ``batches``; else from ``fit``, which may only validate with it."""
    place: str = ""
    """The line that built it."""
    begin_epoch: Callable[[int], None] | None = None
    """What a trainer of another library does before each epoch: it calls ``set_epoch`` for the project."""

    @property
    def as_trained(self) -> bool:
        """Whether ``fit`` trains on what it gives, as it gives it: nothing lies in between."""
        return self.given or self.begin_epoch is not None

    def epochs(self, most: int) -> Callable[[], Any]:
        """A function that gives what is iterated for the next epoch, or for the first batches."""
        numbers = itertools.count()

        def begun() -> Any:
            if self.begin_epoch is not None:
                self.begin_epoch(next(numbers))
            return self.of(most) if self.kind == "function" else self.of

        return begun


class Streams:
    """The streams of one fresh loop that nobody else gets, in an order that is the same for each."""

    def __init__(self, evidence: Evidence) -> None:
        lines: dict[int, str] = {}

        def noting(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def init(loader: Any, *args: Any, **kwargs: Any) -> Any:
                lines[id(loader)] = str(here()[0])
                made.append(loader)
                return original(loader, *args, **kwargs)

            return init

        made: list[Any] = []
        self.assigned = Assigned()
        with patched(DataLoader, "__init__", noting), self.assigned.noting():
            self.loop = loop = evidence.fresh_loop()
            found = list(_of_trainer(loop) if loop.batches is None else _given(loop.batches))
        known = {id(thing) for source in found for thing in (source.of, getattr(source.of, "dataset", None))}
        for name, loader in ReachableObjects.by_fit(loop).loaders:
            # A library wraps a loader in another over the same data, and its trainers keep the loaders that they made.
            order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            if known.isdisjoint((id(loader), id(loader.dataset), id(order))):
                known |= {id(loader), id(order)}
                found.append(Source(name, "loader", loader, trains=False))
        most = [source.of for source in found if source.kind == "loader"][:MOST_LOADERS]
        judged = [source for source in found if source.kind != "loader" or any(source.of is one for one in most)]
        self.sources = [dataclasses.replace(one, place=lines.get(id(one.of), "")) for one in judged]
        self.axis = loop.batch_dim if isinstance(loop.batch_dim, int) else 0
        declared = getattr(loop.padding, "pad_id", None), getattr(loop.padding, "ignore_index", None)
        ids = {*PADS, *declared, *padding_ids(loop.modules.values())} - {None}
        self.pads = tuple(sorted(pad for pad in ids if pad is not None))
        self._timeout = evidence.timeout

    def guarded(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """Do what runs the project's code for data, under the seed of the loop's data and within the time of a run.

        ``work`` gets a function that says whether the time is over. Raises ``TimeRanOut`` and what the code raises.
        """
        guard, made = Guard(self._timeout), []
        with workers_ended(), preserved(), SeededApart(self.loop.seed).in_use():
            error = guard.call(lambda: made.append(work(guard.out_of_time)), lambda: 0)
        if error is not None:
            try:
                raise error
            finally:
                let_go(error)
        return made[0]

    def read(self, source: Source, times: int = 1) -> Reading:
        """Two epochs, or ``times`` as many; of a function as many times as many batches."""
        drawn = DRAWN * times
        most = drawn if source.kind == "function" else MOST_BATCHES
        how: dict[str, Any] = {"axis": self.axis, "pads": self.pads, "epochs": 2 * times, "most": most}
        return self.guarded(lambda out_of_time: read(source.epochs(drawn), **how, out_of_time=out_of_time))


def _of_trainer(loop: TrainLoop) -> Iterator[Source]:
    """The training data of a trainer of another library; none where they cannot be had, as nobody gave them."""
    with preserved(), SeededApart(loop.seed).in_use(), project_may_raise():
        for data in training_data(loop):
            kind: Literal["loader", "iterable"] = "loader" if isinstance(data.loader, DataLoader) else "iterable"
            yield Source(data.name, kind, data.loader, begin_epoch=data.begin_epoch)


def _given(given: Any) -> Iterator[Source]:
    if isinstance(given, DataLoader):
        yield Source("TrainLoop.batches", "loader", given, given=True)
    elif isinstance(given, (list, tuple)):
        yield Source("TrainLoop.batches", "list", given, given=True)
    else:
        function = callable(given) and not hasattr(given, "__iter__")
        yield Source("TrainLoop.batches", "function" if function else "iterable", given, given=True)
        for name, loader in ReachableObjects.by(("batches", given)).loaders:
            yield Source(name, "loader", loader)


class Stream:
    """One stream of the loop, read on a fresh loop of its own: ``source``, as nobody has touched it, and ``now``, which
    was read."""

    def __init__(self, evidence: Evidence, number: int, source: Source) -> None:
        self.evidence, self.number, self.source = evidence, number, source
        self.is_loader = source.kind == "loader"
        self.reading = self._read()
        self.epochs, name = self.reading.cycles(), self.reading.identity
        rows = [row for epoch in self.reading.epochs if name in epoch.leaves for row in epoch.column(name)]
        seen = source.kind != "list" and (bool(self.epochs) or len(set(rows)) < len(rows))
        self.judged = bool(name) and (seen or self.is_loader)
        self.undecided: list[CannotDecide] = []
        if self.reading.epochs[0].batches and not name:
            self.undecided.append(CannotDecide("the axis of rows is not known: give batch_dim=", needs="batch_dim="))
        elif name and not self.judged:
            if source.kind == "function":
                self.undecided.append(CannotDecide(MADE))
            else:
                self.undecided.append(CannotDecide(LISTED if source.kind == "list" else NEW_ROWS, needs="batches="))

    def _read(self) -> Reading:
        """Two epochs of the stream, in this process; the last batch of a loader is kept. Where that raises the stream
        is read as it is.

        Raises ``UserCodeError`` where this raises in the first epoch of a loader that the project gave as ``batches=``,
        ``CannotDecide`` of other data.
        """
        for as_it_is in (False, True):
            self.streams, self.now = self.fresh()
            changed = False
            if self.is_loader and not as_it_is:
                changed = self.now.of.num_workers > 0
                in_this_process(self.now.of)
                sampler = getattr(self.now.of, "batch_sampler", None)
                if type(sampler) is BatchSampler and sampler.drop_last:
                    changed, sampler.drop_last = True, False
            reading = self.streams.read(self.now)
            if reading.raised is None:
                return reading
            if len(reading.epochs) > 1:
                reading.epochs.pop()
                return reading
            if not changed:
                break
        raised, at = present(reading.raised, "what reading raised"), len(reading.epochs[0].batches)
        if self.source.given and self.is_loader:
            raise UserCodeError(user_error(raised, f"reading batch {at} of {self.source.name}"), one_check=True)
        raise CannotDecide(f"reading batch {at} of {self.source.name} raises {first_line(raised, 160)}")

    def fresh(self) -> tuple[Streams, Source]:
        """The same stream of another fresh loop."""
        streams = Streams(self.evidence)
        return streams, streams.sources[self.number]

    def with_loader(self, work: Callable[[Any, Streams], T | None]) -> T | None:
        """What the work gives when it gets the loader of another fresh loop. None where the project's code raises:
        other indices are not asked for in training."""
        streams, source = self.fresh()
        with project_may_raise():
            return streams.guarded(lambda _out_of_time: work(source.of, streams))
        return None

    @property
    def held(self) -> ReachableObjects:
        """What the stream that was read holds."""
        return ReachableObjects.by(("batches" if self.now.given else self.now.name, self.now.of))


def in_this_process(loader: Any) -> Any:
    """The loader itself, reading without workers from now on: for one that is thrown away."""
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.num_workers, loader.timeout = 0, 0
    return loader


def length(loader: Any) -> int:
    """The batches of a loader; 0 where it does not know."""
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(loader)
    return 0


def first_line(error: BaseException, most: int) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:most]}"


# What the stream's own code stores


def pair_stored(held: ReachableObjects, epoch: Epoch, x: str, y: str) -> tuple[str, str, int]:
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


def last_rows_never_drawn(stream: Stream) -> Iterator[Finding]:
    """The indices that a loader hands out in some epochs leave out the same last rows, fewer than a batch has."""

    def work(loader: Any, _streams: Streams) -> list[list[int]]:
        batches = [list(itertools.islice(loader.batch_sampler, MOST_BATCHES + 1)) for _ in range(EPOCHS)]
        return [[] if len(epoch) > MOST_BATCHES else list(itertools.chain.from_iterable(epoch)) for epoch in batches]

    loader = stream.source.of
    if not stream.source.as_trained or loader.batch_size is None or epoch_setter(loader)[0]:
        return
    epochs, rows, size = stream.with_loader(work) or [[]], len(loader.dataset), loader.batch_size
    drawn = set(epochs[0])
    missing = rows - len(drawn)
    if 0 < missing < size and drawn == set(range(rows - missing)) and all(set(epoch) == drawn for epoch in epochs):
        shuffled = any(epoch != epochs[0] for epoch in epochs)
        facts = {"missing": missing, "rows": rows, "drawn": len(drawn), "size": size, "epochs": EPOCHS}
        names, level = (stream.source.name,), "advice"
        order = line_of(getattr(type(loader.sampler), "__iter__", None))
        facts |= {"level": level, "shuffled": shuffled, "change": loop_of(order)}
        yield found("rows_never_drawn", stream.source, names, "the last ones", **facts)


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


def shared_lists(held: ReachableObjects) -> dict[int, tuple[Any, int]]:
    """The lists that all records hold in one slot, with their digests, by ``id``."""
    slots = [values for _, records in held.records for values in _slots(list(records)).values()]
    firsts = [values[0] for values in slots if len(values) > 1 and all(value is values[0] for value in values)]
    return {id(first): (first, digest(first)) for first in firsts if isinstance(first, (list, collections.deque))}


def shared_slots(
    held: ReachableObjects, loop: TrainLoop, earlier: Mapping[int, tuple[Any, int]] | None = None
) -> Iterator[Finding]:
    """Slots of records that hold one object which was written in place, at least once a record; no tensors of the
    model. ``earlier``: what the lists held that several records shared then; a list of names never changes."""
    modules = loop.modules.values()
    own = {id(t) for module in modules for t in (*members.parameters(module), *members.buffers(module))}
    for path, records in held.records:
        for slot, values in _slots(list(records)).items() if len(records) >= LEAST_RECORDS else ():
            first = values[0]
            if id(first) in own or any(value is not first for value in values):
                continue
            facts: dict[str, Any] = {"path": path, "records": len(values), "written": 0, "level": "advice"}
            facts["shape"] = str(tuple(getattr(first, "shape", ())))
            if isinstance(first, (list, collections.deque)):
                known = (earlier or {}).get(id(first))
                if known is None or digest(first) == known[1]:
                    continue
                facts |= {"level": "fault", "kind": type(first).__name__}
            elif isinstance(first, torch.Tensor):
                facts |= {"written": writes_in_place(first), "level": "fault"}
                if isinstance(first, torch.nn.Parameter) or facts["written"] < len(values):
                    continue
            elif not isinstance(first, np.ndarray) or not first.ndim:  # an array does not count what is written
                continue
            variant = "list" if "kind" in facts else ""
            yield found("slots_share_tensor", "", (f"{path}[...]{slot}",), variant, **facts)


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
