"""The streams of batches of a loop, and what they give: rows, epoch by epoch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from pytest_trainloop import nested
from pytest_trainloop.adapters.training_data import training_data
from pytest_trainloop.batches.padding import padding_ids
from pytest_trainloop.checks.state.data_order.passes import LEAST_ROWS, LoaderPasses, Pass, orders_drawn
from pytest_trainloop.errors import CannotDecide, UserCodeError
from pytest_trainloop.reach.entering import Entering
from pytest_trainloop.reach.graph import Graph
from pytest_trainloop.reach.places import Place
from pytest_trainloop.reach.sorts import is_plain, sort_of, sort_of_root
from pytest_trainloop.reach.walker import quiet
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.samples import as_bytes
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import has_values
from pytest_trainloop.runs.guard import Guard, let_go
from pytest_trainloop.runs.loader_workers import workers_ended
from pytest_trainloop.runs.process_state import SeededApart, preserved
from pytest_trainloop.runs.user_traceback import user_error
from pytest_trainloop.whose import present, project_may_raise, reraise_ours

if TYPE_CHECKING:
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

T = TypeVar("T")

DRAWN = 48
"""Batches that are asked of ``batches(n)``."""

MOST_BATCHES = 400
MOST_ROWS = 4096
"""Of one epoch that are read."""

MOST_LOADERS = 4
"""Loaders that are judged."""

MOST_OBJECTS = 20_000
"""Objects that are looked into for data."""

PADS = (0, -100)
"""Ids that pad rows to one width, besides the declared ones: the same row has another width in another batch."""

NEW_ROWS = (
    "no row comes twice in 48 batches (augmented or made on the fly); give the DataLoader itself as batches= to have "
    "its data set and sampler judged"
)
LISTED = "the batches are a list, which has no order of its own: give the DataLoader that they come from as batches="

# What is held


@dataclass(slots=True)
class Held:
    """What functions and loaders hold, each with the path by which it was reached."""

    loaders: list[tuple[str, Any]] = field(default_factory=list)
    stored: list[tuple[str, Any]] = field(default_factory=list)
    """Tensors, arrays and lists of numbers."""
    records: list[tuple[str, Sequence[Any]]] = field(default_factory=list)
    """Lists and deques of anything else."""
    generators: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """The names that the code of functions reads: globals, attributes, methods."""

    @classmethod
    def by(cls, *roots: tuple[str, Any]) -> Held:
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
    def by_fit(cls, loop: TrainLoop) -> Held:
        return cls.by(*((name, f) for name, f in (("fit", loop.fit), ("step", loop.step)) if f is not None))

    def _take(self, path: str, value: Any) -> None:
        sort = sort_of(value)
        if isinstance(value, types.FunctionType):
            self.names |= _names(value.__code__) if sort != "ours" else set()
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


# Rows by digest


class Leaf(NamedTuple):
    """What one tensor, array or list of a batch holds: a digest for each row, and what a row is."""

    digests: tuple[int, ...]
    floating: bool
    shape: tuple[int, ...]
    dtype: str
    elements: int
    nbytes: int

    @property
    def is_label(self) -> bool:
        """Whether a row is one whole number, or one word."""
        return not self.floating and self.elements == 1


Batch = Mapping[str, Leaf]
"""The leaves of a batch that have rows, by path."""


def rows_of(batch: Any, axis: int = 0, pads: Collection[int] = PADS) -> dict[str, Leaf]:
    """The leaves of a batch along the dimension in which its rows lie. A list of examples is read by their fields."""
    leaves = {}
    for path, rows in values_of(batch, axis).items():
        if any(isinstance(row, torch.Tensor) and not _readable(row) for row in rows):
            continue
        digests, first = tuple(digest(row, pads) for row in rows), array_of(rows[0])
        if first is None:
            size = len(rows[0]) if isinstance(rows[0], str) else 8
            leaves[path] = Leaf(digests, False, (), type(rows[0]).__name__, 1, size)
        else:
            floating = first.dtype.kind in "fcV"
            leaves[path] = Leaf(digests, floating, first.shape, str(first.dtype), first.size, first.nbytes)
    return leaves


def values_of(batch: Any, axis: int = 0) -> dict[str, Any]:
    """The values of a batch that have rows, by path, each as a sequence of its rows."""
    found = dict(_values(batch, axis))
    lengths = [len(rows) for rows in found.values()]
    count = max(dict.fromkeys(lengths), key=lengths.count, default=0)
    return {path: rows for path, rows in found.items() if count and len(rows) == count}


def _values(value: Any, axis: int, path: nested.Path = (), depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        if _readable(value) and -value.dim() <= axis < value.dim() and value.numel():
            yield nested.shown(path), _as_array(value.movedim(axis, 0))
    elif isinstance(value, np.ndarray):
        if value.ndim and value.size:
            yield nested.shown(path), value
    elif isinstance(value, (list, tuple)) and value and {type(row) for row in value} <= {str, int, float, bool, bytes}:
        if not hasattr(value, "_fields"):
            yield nested.shown(path), list(value)
    elif isinstance(value, list) and value and len({type(row) for row in value}) == 1 and _is_example(value[0]):
        rows = [dict(nested.named_children(row)) for row in value]
        for key in rows[0]:
            if all(key in row for row in rows):
                yield nested.shown((*path, key)), [row[key] for row in rows]
    elif depth < 6 and not isinstance(value, (str, bytes, int, float, complex, type(None), type, torch.nn.Module)):
        for key, child in nested.named_children(value):
            yield from _values(child, axis, (*path, key), depth + 1)


def _is_example(value: Any) -> bool:
    return isinstance(value, (Mapping, tuple)) or dataclasses.is_dataclass(value)


def array_of(value: Any) -> np.ndarray[Any, Any] | None:
    """A tensor, an array, a number or a list of numbers as an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        return _as_array(value) if _readable(value) else None
    plain = isinstance(value, (np.ndarray, np.generic, int, float)) or (
        isinstance(value, list) and all(isinstance(entry, (int, float)) for entry in value)
    )
    array = np.asarray(value) if plain else None
    return None if array is None or array.dtype == object else array


def digest(value: Any, pads: Collection[int] = ()) -> int:
    """The digest of one value: a tensor, an array, or a nest of these and plain data. It leaves out the padding at the
    ends of a row of ids, which has another width in another batch."""
    if isinstance(value, torch.Tensor):
        if not _readable(value):
            return hash(("unread", id(value)))
        value = _as_array(value)
    if isinstance(value, (int, float, np.generic)):
        value = np.asarray(value)  # as the entry of an array that is made of such values
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "iu" and value.ndim == 1 and pads:
            kept = np.flatnonzero(~np.isin(value, list(pads)))
            value = value[kept[0] : kept[-1] + 1] if len(kept) else value[:0]
        return hash(np.ascontiguousarray(value).tobytes().rstrip(b"\0"))
    if isinstance(value, (str, bytes, complex, type(None))):
        return hash(value)
    return hash(tuple((str(key), digest(child, pads)) for key, child in nested.named_children(value)))


def _readable(tensor: torch.Tensor) -> bool:
    return has_values(tensor) and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The entries as an array; those of a dtype that numpy lacks by their bits."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return plain.numpy()
    except TypeError:
        return as_bytes(plain).numpy().view(f"V{plain.element_size()}").reshape(tuple(plain.shape))


# Epochs


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


def sizes(batches: Sequence[Batch]) -> list[int]:
    """The number of rows of each batch."""
    return [len(next(iter(batch.values())).digests) if batch else 0 for batch in batches]


@dataclass(slots=True)
class Reading:
    """What was read of one stream. Its first epoch has a batch where ``identity`` is not empty."""

    epochs: list[Epoch] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    raised: BaseException | None = None

    @property
    def identity(self) -> str:
        """The leaf that tells rows apart: the one of most bytes, and of those the one with most different rows."""
        first = self.epochs[0]
        if not first.batches:
            return ""
        size = {path: (first.batches[0][path].nbytes, len(set(first.column(path)))) for path in first.leaves}
        return max(size, key=size.__getitem__, default="")

    def cycles(self) -> list[Epoch]:
        """The epochs that were read, or the windows of a stream that goes on. None where no epoch is seen.

        An epoch is E batches if all windows of E batches that follow one another hold the same rows.
        """
        if len(self.epochs) > 1 and all(epoch.complete for epoch in self.epochs):
            return self.epochs
        first, name = self.epochs[0], self.identity
        if not name:
            return []
        counts = [Counter(batch[name].digests) for batch in first.batches]
        for length in range(1, len(counts) // 2 + 1):
            starts = range(0, len(counts) - length + 1, length)
            windows = [sum(counts[i : i + length], Counter()) for i in starts]
            if all(window == windows[0] for window in windows):
                drawn = [0, *first.drawn_before]
                return [Epoch(first.batches[i : i + length], first.draws[drawn[i] : drawn[i + length]]) for i in starts]
        return []


def read(
    give: Callable[[], Iterable[Any]],
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
    reading, noted, total = Reading(), LoaderPasses(), 0
    with noted.noting(steps=lambda: total):
        try:
            for _ in range(epochs):
                epoch, before, rows = Epoch(), len(noted.passes), 0
                reading.epochs.append(epoch)
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
                        rows += sizes(epoch.batches[-1:])[0]
                        total += 1
                own = noted.passes[before:]
                if len(own) == 1 and own[0].indexed:
                    epoch.ascending = own[0].ascending
                    epoch.order = own[0].order if own[0].complete and own[0].rows >= len(epoch.batches) else None
                if isinstance(stream, DataLoader) and all(one.indexed for one in own):
                    epoch.draws = [draw for one in own for draw in one.draws]
                if isinstance(stream, (Iterator, list, tuple)) or not (epoch.complete and epoch.batches):
                    break
        except Exception as error:  # of the project's data set, sampler or collate function
            reraise_ours(error)
            reading.raised = error
    reading.passes = noted.passes
    return reading


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
        with patched(DataLoader, "__init__", noting):
            self.loop = loop = evidence.fresh_loop()
            found = list(_of_trainer(loop) if loop.batches is None else _given(loop.batches))
        known = {id(thing) for source in found for thing in (source.of, getattr(source.of, "dataset", None))}
        for name, loader in Held.by_fit(loop).loaders:
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
        for name, loader in Held.by(("batches", given)).loaders:
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
            self.undecided.append(CannotDecide("rows cannot be told: give batch_dim=", needs="batch_dim="))
        elif name and not self.judged:
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
        """What the work gives, which is handed the loader of another fresh loop. None where the project's code raises:
        other indices are not asked for in training."""
        streams, source = self.fresh()
        with project_may_raise():
            return streams.guarded(lambda _out_of_time: work(source.of, streams))
        return None

    @property
    def held(self) -> Held:
        """What the stream that was read holds."""
        return Held.by(("batches" if self.now.given else self.now.name, self.now.of))


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
