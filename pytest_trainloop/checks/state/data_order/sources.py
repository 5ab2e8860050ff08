"""Where a loop's data come from: what is given as ``batches=``, and the loaders that ``batches`` and ``fit`` hold."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.utils.data import BatchSampler, DataLoader

from pytest_trainloop.adapters.training_data import training_data
from pytest_trainloop.batches.padding import padding_ids
from pytest_trainloop.checks.state.data_order.held import Held
from pytest_trainloop.checks.state.data_order.in_fit import held_by_fit
from pytest_trainloop.checks.state.data_order.rows import PADS
from pytest_trainloop.checks.state.data_order.streams import DRAWN
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.guard import Guard, let_go
from pytest_trainloop.runs.loader_workers import workers_ended
from pytest_trainloop.runs.process_state import SeededApart, preserved
from pytest_trainloop.whose import project_may_raise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

T = TypeVar("T")

MOST_LOADERS = 4
"""Loaders that are judged, at most."""

Kind = Literal["loader", "function", "iterable", "list"]


@dataclass(frozen=True, slots=True)
class Source:
    """One stream of batches of a loop."""

    name: str
    """As the project writes it."""
    kind: Kind
    of: Any
    """The loader, the function or the iterable."""
    given: bool
    """Whether it is ``batches`` itself."""
    trains: bool
    """Whether it was reached from ``batches``; else from ``fit``, which may only validate with it."""
    where: str = ""
    """The line that built it."""
    begin_epoch: Callable[[int], None] | None = None
    """What a trainer of another library does before each epoch: it calls ``set_epoch`` for the project."""

    @property
    def as_trained(self) -> bool:
        """Whether ``fit`` trains on what it gives, as it gives it: nothing lies in between."""
        return self.given or self.begin_epoch is not None

    def stream(self, most: int = DRAWN) -> Any:
        """What is iterated for one epoch, or for the first batches."""
        return self.of(most) if self.kind == "function" else self.of

    def epochs(self, most: int = DRAWN) -> Callable[[], Any]:
        """A function that gives what is iterated for the next epoch."""
        begin_epoch, numbers = self.begin_epoch, itertools.count()
        if begin_epoch is None:
            return functools.partial(self.stream, most)

        def begun() -> Any:
            begin_epoch(next(numbers))
            return self.stream()

        return begun


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one fresh loop, in an order that is the same for each."""

    loop: TrainLoop
    sources: tuple[Source, ...]

    @classmethod
    def of(cls, evidence: Evidence) -> Streams:
        """Those of a loop that nobody else gets."""
        made: list[tuple[Any, str]] = []
        with patched(DataLoader, "__init__", functools.partial(_noting, made)):
            loop = evidence.fresh_loop()
            trained = _of_trainer(loop)
        lines = {id(loader): line for loader, line in made}
        found = [*_given(loop, lines), *(replace(one, where=lines.get(id(one.of), "")) for one in trained)]
        known = {id(thing) for source in found for thing in (source.of, getattr(source.of, "dataset", None))}
        for name, loader in held_by_fit(loop).loaders:
            # A library wraps a loader in another over the same data, and its trainers keep the loaders that they made.
            order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            if known.isdisjoint((id(loader), id(loader.dataset), id(order))):
                known |= {id(loader), id(order)}
                found.append(Source(name, "loader", loader, given=False, trains=False, where=lines.get(id(loader), "")))
        loaders = [source for source in found if source.kind == "loader"][:MOST_LOADERS]
        return cls(loop, tuple(source for source in found if source.kind != "loader" or source in loaders))

    @property
    def axis(self) -> int:
        return self.loop.batch_dim if isinstance(self.loop.batch_dim, int) else 0

    @property
    def pads(self) -> tuple[int, ...]:
        """Ids that pad rows."""
        declared = getattr(self.loop.padding, "pad_id", None), getattr(self.loop.padding, "ignore_index", None)
        known = (*PADS, *declared, *padding_ids(self.loop.modules.values()))
        return tuple(sorted({pad for pad in known if pad is not None}))


def _noting(made: list[tuple[Any, str]], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(loader: Any, *args: Any, **kwargs: Any) -> Any:
        made.append((loader, str(here()[0])))
        return original(loader, *args, **kwargs)

    return init


def _of_trainer(loop: TrainLoop) -> list[Source]:
    """The training data of a trainer of another library; none where they cannot be had, as nobody gave them."""
    found: list[Source] = []
    if loop.batches is None:
        with preserved(), SeededApart(loop.seed).in_use(), project_may_raise():
            for data in training_data(loop):
                kind: Kind = "loader" if isinstance(data.loader, DataLoader) else "iterable"
                found.append(Source(data.name, kind, data.loader, False, True, begin_epoch=data.begin_epoch))
    return found


def _given(loop: TrainLoop, lines: dict[int, str]) -> Iterator[Source]:
    given = loop.batches
    if given is None:
        return
    if callable(given) and not hasattr(given, "__iter__"):
        kind: Kind = "function"
    elif isinstance(given, DataLoader):
        kind = "loader"
    else:
        kind = "list" if isinstance(given, (list, tuple)) else "iterable"
    yield Source("TrainLoop.batches", kind, given, given=True, trains=True, where=lines.get(id(given), ""))
    if kind in ("function", "iterable"):
        for name, loader in Held.by(("batches", given)).loaders:
            yield Source(name, "loader", loader, given=False, trains=True, where=lines.get(id(loader), ""))


def guarded(evidence: Evidence, loop: TrainLoop, work: Callable[[Callable[[], bool]], T]) -> T:
    """Do what runs the project's code for data, under the seed of the loop's data and within the time of a run.

    ``work`` gets a function that says whether the time is over. Raises ``TimeRanOut`` and what the code raises.
    """
    guard, made = Guard(evidence.timeout), []
    with workers_ended(), preserved(), SeededApart(loop.seed).in_use():
        error = guard.call(lambda: made.append(work(guard.out_of_time)), lambda: 0)
    if error is not None:
        try:
            raise error
        finally:
            let_go(error)
    return made[0]


def drops_all(loader: Any) -> tuple[int, int] | None:
    """The rows and the batch size of a loader that drops the only batch that it could give."""
    sampler = getattr(loader, "batch_sampler", None)
    with contextlib.suppress(TypeError, NotImplementedError):
        if isinstance(sampler, BatchSampler) and sampler.drop_last and len(loader.dataset) and len(loader) == 0:
            return len(sampler.sampler), sampler.batch_size  # type: ignore[arg-type]
    return None


def keep_last(loader: Any) -> bool:
    """Have the loader give its last batch too, for one that is thrown away; whether that changes anything."""
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is not BatchSampler or not sampler.drop_last:
        return False
    sampler.drop_last = False
    return True


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


def some_indices(loader: Any, most: int = 64) -> list[Any]:
    """The first indices that the loader's sampler gives."""
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None:
        first: Any = next(iter(batch_sampler), [])
        return list(first)[:most] if isinstance(first, (list, tuple)) else []
    return list(itertools.islice(iter(loader.sampler), most))
