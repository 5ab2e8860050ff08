"""What a stream of batches gives: its rows by digest, epoch by epoch, and what drew their order.

The order of a DataLoader is that of the indices that its sampler hands out, whatever sampler that is. What it draws is
noted where the indices are asked for: an augmentation draws later, where the batch is fetched. Draws are those of
torch, numpy and python.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from pytest_trainloop.checks.state.data_order.rows import Batch, rows_of
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import loader_calls

MOST_BATCHES = 400
MOST_ROWS = 4096
"""Of one epoch that are read."""

LEAST_ROWS = 10
"""Different rows below which the same order twice may be chance: of ten rows one in 3.6 million orders is."""

ORDERS = frozenset({"randperm", "multinomial", "randint"})
"""What torch draws an order with. ``random_`` is not among them: a DataLoader draws the seed of its workers so."""

IN_SAMPLERS = ORDERS | {"rand", "randn", "rand_like", "randn_like"}
"""The same inside samplers, where whatever is drawn is for the order: ``torch.rand(n).argsort()``."""


# Draws


class Draws(FunctionMode):
    """The draws of torch by these names while the mode is on, as (name, digest of the numbers)."""

    def __init__(self, names: frozenset[str] = ORDERS, least: int = 0, into: list[tuple[str, int]] | None = None):
        super().__init__()
        self._names, self._least = names, least
        self.seen: list[tuple[str, int]] = [] if into is None else into

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(name, func, args, kwargs)
        if name in self._names and isinstance(out, torch.Tensor):
            numbers = out.detach().cpu()
            numbers = numbers.float() if numbers.dtype is torch.bfloat16 else numbers
            _note(self.seen, self._least, name, numbers.numpy())
        return out


def _note(into: list[tuple[str, int]], least: int, name: str, order: Any) -> None:
    """Note an order of at least so many entries. Numbers that may be equal choose rows, and are no labels or tokens, if
    there is one for each row and most of them are different (odd: stream_of_rows_from_fixed_seeds)."""
    entries = len(order) if getattr(order, "ndim", 1) and hasattr(order, "__len__") else 1
    if entries < least:
        return
    if least and name.endswith(("choice", "randint")):
        numbers = np.asarray(order)
        if numbers.ndim != 1 or 2 * len(set(numbers.tolist())) <= len(numbers):
            return
    into.append((name, hash(order.tobytes()) if hasattr(order, "tobytes") else hash(repr(order))))


class _Here(threading.local):
    """Where the current thread notes what python and numpy draw."""

    def __init__(self) -> None:
        self.into: list[tuple[str, int]] | None = None
        self.least = 0


_HERE = _Here()


@contextlib.contextmanager
def orders_drawn(into: list[tuple[str, int]], names: frozenset[str] = ORDERS, least: int = 0) -> Iterator[None]:
    """Note the permutations that this thread draws in the block: those of torch by these names, and inside
    ``others_noted`` those of numpy and python. With ``least`` only those of as many entries: where items are made as
    well, one number is no order, and a generator with a seed of its own may be an item's."""
    before = _HERE.into, _HERE.least
    _HERE.into, _HERE.least = into, least
    try:
        with Draws(names, least, into):
            yield
    finally:
        _HERE.into, _HERE.least = before


@contextlib.contextmanager
def others_noted() -> Iterator[None]:
    """Have permutations of numpy and python noted too, in all threads.

    Of their generators those are seen that are called through the module, python's own, and the making of a new one of
    numpy's with a seed: its methods cannot be replaced, and what it draws is the same each time.
    """
    with Patches() as patches:
        for owner in (random, random.Random):
            for name in ("shuffle", "sample"):
                patches.put(owner, name, functools.partial(_noted, f"{owner.__name__}.{name}"))
        for name in ("shuffle", "permutation", "choice", "randint"):
            patches.put(np.random, name, functools.partial(_noted, f"np.random.{name}"))
        patches.put(np.random, "default_rng", _made)
        patches.put(np.random, "RandomState", _class_noted)
        yield


def _noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if _HERE.into is not None:
            _note(_HERE.into, _HERE.least, name, args[-1] if out is None and args else out)
        return out

    return call


def _note_seed(name: str, given: tuple[Any, ...]) -> None:
    if _HERE.into is not None and not _HERE.least and given and isinstance(given[0], int):
        _HERE.into.append((f"np.random.{name}", hash(repr(given))))


def _made(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _note_seed("default_rng", (*args, *kwargs.values()))
        return original(*args, **kwargs)

    return call


def _class_noted(original: Any) -> Any:
    """The same for a class: what it makes are objects of the original, and these stay its instances."""

    class Meta(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, original) if cls is noted else super().__instancecheck__(thing)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            _note_seed(original.__name__, (*args, *kwargs.values()))
            return original(*args, **kwargs) if cls is noted else super().__call__(*args, **kwargs)

    noted = Meta(original.__name__, (original,), {})
    return noted


# Passes


@dataclass(slots=True)
class Pass:
    """One pass over a DataLoader. Plain data: nothing of the project is held."""

    loader: int
    """The number of the loader: those over one data set that are iterated by one line count as one."""
    place: str
    """The line that asked for the iterator."""
    sampler: str
    """The class of the sampler that gives the order."""
    set_epoch: str
    """What has a method ``set_epoch``, as one would write it after the loader: "sampler", "batch_sampler"."""
    steps_at: list[int] = field(default_factory=list)
    """Optimizer steps made when each batch was yielded."""
    order: int = 0
    """The digest of all indices in their order."""
    rows: int = 0
    ascending: bool = True
    """Whether the indices only grow."""
    draws: list[tuple[str, int]] = field(default_factory=list)
    """What was drawn for the order."""
    complete: bool = False
    kept_by_cycle: bool = False
    """Whether ``itertools.cycle`` holds the iterator: it keeps the batches and gives them again and again."""
    steps_after: int = 0
    """Optimizer steps made at the end of the block."""
    indexed: bool = True
    """Whether the sampler gives indices: not where the data set only iterates."""
    _last: int | None = None

    @property
    def trained(self) -> bool:
        """Whether optimizer steps were made between the batches."""
        return len(self.steps_at) > 1 and self.steps_at[-1] > self.steps_at[0]

    @property
    def given_again(self) -> bool:
        """Whether its batches were given again from what ``itertools.cycle`` keeps."""
        return self.kept_by_cycle and self.steps_after > self.steps_at[-1]

    def take(self, index: Any) -> None:
        indices = list(index) if isinstance(index, (list, tuple)) else [index]
        self.indexed = self.indexed and None not in indices
        self.order = hash((self.order, repr(indices)))
        self.rows += len(indices)
        for one in indices:
            number = one if isinstance(one, int) else None
            self.ascending = self.ascending and number is not None and (self._last is None or number >= self._last)
            self._last = number


class LoaderPasses:
    """Notes the passes in a block."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    @contextlib.contextmanager
    def noting(self, steps: Callable[[], int], ignored: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Note passes in the block; what identifies a loader is let go of at its end. ``steps`` gives the optimizer
        steps so far, ``ignored`` says what is not the loop's."""
        numbers: dict[tuple[int, str], int] = {}
        held: list[Any] = []
        under_way: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        looked_for_cycle: set[int] = set()

        def begins(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def begin(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
                if ignored() or True in (*args, *kwargs.values()):  # the first reset belongs to the iterator's making
                    return original(iterator, loader, *args, **kwargs)
                data, place = getattr(loader, "dataset", loader), str(here()[0])
                held.append(data)
                number = numbers.setdefault((id(data), place), len(numbers))
                noted = Pass(number, place, type(order_of(loader)).__name__, epoch_setter(loader)[0])
                self.passes.append(noted)
                under_way[iterator] = noted
                with orders_drawn(noted.draws, IN_SAMPLERS):
                    return original(iterator, loader, *args, **kwargs)

            return begin

        def draws(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def indices(iterator: Any) -> Any:
                noted = under_way.get(iterator)
                if noted is None:
                    return original(iterator)
                with orders_drawn(noted.draws, IN_SAMPLERS):
                    index = original(iterator)
                noted.take(index)
                return index

            return indices

        def gives(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def step(iterator: Any) -> Any:
                noted = under_way.get(iterator)
                if noted is None:
                    return original(iterator)
                try:
                    batch = original(iterator)
                except StopIteration:
                    if not noted.complete:
                        noted.complete = True
                        noted.steps_at.append(steps())
                        if noted.draws and noted.loader not in looked_for_cycle:  # once: it goes through all objects
                            looked_for_cycle.add(noted.loader)
                            holders = gc.get_referrers(iterator)
                            noted.kept_by_cycle = any(type(holder) is itertools.cycle for holder in holders)
                    raise
                noted.steps_at.append(steps())
                return batch

            return step

        kind, names = loader_calls()
        with others_noted(), Patches() as patches:
            for name, wrap in (("begin", begins), ("again", begins), ("indices", draws), ("next", gives)):
                patches.put(kind, names[name], wrap)  # "again": workers live on
            try:
                yield
            finally:
                for one in self.passes:
                    one.steps_after = steps()
                under_way.clear()


def order_of(loader: Any) -> Any:
    """What gives the order: the sampler, or a batch sampler of its own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    own = None if type(batch_sampler) is BatchSampler else batch_sampler
    return inner or own or getattr(loader, "sampler", None)


def epoch_setter(loader: Any) -> tuple[str, Any]:
    """Where the project is to call ``set_epoch``, as an attribute of the loader, and the object that has it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for path, owner in (
        ("sampler", getattr(loader, "sampler", None)),
        ("batch_sampler", batch_sampler),
        ("batch_sampler.sampler", getattr(batch_sampler, "sampler", None)),
        ("dataset", getattr(loader, "dataset", None)),
    ):
        if callable(getattr(type(owner), "set_epoch", None)):
            return path, owner
    return "", None


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
        """The leaf that identifies rows: the one of most bytes, and of those the one with most different rows."""
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
