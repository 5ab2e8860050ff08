"""The batches that ``fit`` gets: sized, re-iterable, fresh copies, and empty once the run has been long enough."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.whose import of_the_project, reraise_ours
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.fields import require_dimensions
from pytest_trainloop.runs.float64 import widen_batch
from pytest_trainloop.runs.kept_batches import has_workers
from pytest_trainloop.runs.process_state import SeededApart
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    from pytest_trainloop.declare.loop import TrainLoop

EMPTY_PASSES = 64
"""Empty passes over the batches after which a loop is taken for one that never ends."""

PASSES_WITHOUT_STEP = 2
"""Passes over all batches after which, without an optimizer step so far, each further one counts as an empty one:
statistics take a few, and a loop that never steps may take passes for ever."""


MOST_PASSES = 64
"""Epochs that are counted separately: what is taken in later ones is counted with the last."""


class Batches(Sequence[Any]):
    """``count`` batches of the loop, or ``items``, or those of ``stream``.

    ``spent`` says whether the run has been long enough, ``stepped`` whether it has made an optimizer step. ``stop``
    raises, and ends a loop that iterates for ever; ``out_of_time`` says whether its time is over. A pass in which no
    step happens ends after ``read_ahead`` items: such a loop collects its batches first. A pass over ``items`` is cut
    short by the time only, and is the only one. ``before`` is called with the number of each batch and the batch. What
    the project draws only when it is asked for is drawn inside ``drawing()`` and under random states of its own: late
    batches are those of a list drawn before. Unknown attributes are those of the project's own loader, so that
    ``batches.dataset`` and ``batches.batch_size`` work.
    """

    def __init__(
        self,
        loop: TrainLoop,
        count: int,
        *,
        spent: Callable[[], bool],
        stepped: Callable[[], bool],
        stop: Callable[[], None],
        out_of_time: Callable[[], bool] = lambda: False,
        read_ahead: int | None,
        items: Sequence[Any] | None = None,
        stream: Iterator[Any] | None = None,
        before: Callable[[int, Any], None] = lambda number, item: None,
        drawing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        double: bool = False,
    ) -> None:
        self._double = double
        self._loop = loop
        self._drawing = drawing
        self._random = SeededApart(loop.seed)
        self._count = count
        self._spent = spent
        self._stepped = stepped
        self._stop = stop
        self._out_of_time = out_of_time
        self._read_ahead = read_ahead
        self._late = stream is None and items is None and not isinstance(loop.batches, (list, tuple, type(None)))
        self._source = stream if stream is not None else iter(items) if items is not None else self._own(count)
        self._before = before
        self._once = items is not None
        self._through = False
        self._cache: list[Any] = []
        self._empty_passes = 0
        self._requests = 0
        self._ended = False
        self._part: Batches | None = None
        self.taken = 0
        self.counted = False
        """Whether their number was asked for."""
        self.passes: list[int] = []
        """Batches taken in each of the first passes."""
        self.cut_short = False
        """Whether the run had been long enough before the loop was through."""
        self.held_back = False
        """Whether a pass ended because no step had been made."""

    def __len__(self) -> int:
        self.counted = True
        return self._count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._loop.batches is None:
            raise of_the_project(
                AttributeError(f"the batches given to fit have no attribute {name!r}; they are a sized sequence")
            )
        return getattr(self._loop.batches, name)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        try:
            position = range(self._count)[index]
        except (IndexError, TypeError) as error:
            raise of_the_project(error) from None
        return self._give(self._fresh(position))

    def __copy__(self) -> Batches:
        return self

    def __deepcopy__(self, _memo: Any) -> Batches:
        """Itself: a copy of the trainer that holds it goes on with the batches of the run."""
        return self

    def __reduce__(self) -> Any:
        """A pickle of it is the list of its batches."""
        drawn: list[Any] = []
        with contextlib.suppress(IndexError):
            drawn.extend(self._fresh(position) for position in range(self._count))
        return list, (drawn,)

    @property
    def at_end(self) -> int | None:
        """How many requests there were so far, if the last one was answered by the end of the batches."""
        if self._part is not None:
            return self._part.at_end
        return self._requests if self._ended else None

    def close(self) -> None:
        """Let go of the source: workers of a DataLoader end with it."""
        self._source = iter(())
        self._cache.clear()
        self._part = None

    def draw(self, count: int) -> None:
        """Draw the first batches now; fewer, where there are fewer."""
        with contextlib.suppress(IndexError):
            self._nth(count - 1)

    def part(
        self,
        first: int,
        count: int,
        *,
        spent: Callable[[], bool],
        stepped: Callable[[], bool],
        stop: Callable[[], None],
        before: Callable[[int], None] = lambda number: None,
    ) -> Batches:
        """``count`` of these batches from the given one on, as batches of their own for another call of ``fit``.

        They begin again at the first one where these are fewer.
        """
        self.draw(first + count)

        def numbered(number: int, item: Any) -> None:
            before(number)
            self._before(self.taken, item)
            self.taken += 1

        drawn = self._cache
        self._part = Batches(
            self._loop,
            count,
            stream=iter([drawn[(first + i) % len(drawn)] for i in range(count)]),
            spent=spent,
            stepped=stepped,
            stop=stop,
            out_of_time=self._out_of_time,
            read_ahead=None,
            before=numbered,
            double=self._double,
        )
        return self._part

    def __iter__(self) -> Iterator[Any]:
        self._requests += 1
        spent = (self._once and self._through and self._stepped()) or self._over()
        self.cut_short = self.cut_short or spent
        if spent or (self.taken >= PASSES_WITHOUT_STEP * self._count and not self._stepped()):
            self._empty_passes += 1
            if self._empty_passes > EMPTY_PASSES:
                self._stop()
        if len(self.passes) < MOST_PASSES:
            self.passes.append(0)
        return self._pass(len(self.passes) - 1)

    def _pass(self, number: int) -> Iterator[Any]:
        for item in self._items():
            self.passes[number] += 1
            yield item
        self._requests += 1
        self._ended = True

    def _items(self) -> Iterator[Any]:
        for position in range(self._count):
            if self._over():
                self.cut_short = True
                return
            if self._read_ahead is not None and position >= self._read_ahead and not self._stepped():
                self.held_back = True
                return
            try:
                item = self._fresh(position)
            except IndexError:
                return
            yield self._give(item)
        self._through = True

    def _give(self, item: Any) -> Any:
        self._before(self.taken, item)
        self._requests += 1
        self._ended = False
        self.taken += 1
        return item

    def _over(self) -> bool:
        """Whether a pass ends early; one over ``items`` does only if the time is over."""
        return (not self._once and self._spent()) or self._out_of_time()

    def _fresh(self, position: int) -> Any:
        field = "batch" if self._loop.batches is None else f"batches[{position}]"
        copy = nested.copy(self._nth(position), field)
        return widen_batch(copy) if self._double else copy

    def _own(self, count: int) -> Iterator[Any]:
        with self._random.in_use():
            return _source(self._loop, count)

    def _next(self) -> Any:
        if not self._late:
            return next(self._source)
        with self._drawing(), self._random.in_use():
            return next(self._source)

    def _nth(self, position: int) -> Any:
        while len(self._cache) <= position:
            try:
                item = self._next()
                if self._loop.batches is not None:
                    nested.require_batch(item, f"batches[{len(self._cache)}]")
                    require_dimensions(self._loop, item)
                    for names in [] if self._loop.padding is None or self._cache else self._loop.padding.names:
                        if any(nested.is_named(path, names) for path, _ in nested.paths(item)):
                            nested.require_names([item], names, "TrainLoop.padding")  # later ones may have others
                if self._loop.roles and not self._cache and not isinstance(item, torch.Tensor):
                    self._loop.roles.require_in(item)  # a loop that makes its own data is given any tensor
                self._cache.append(item)
            except StopIteration:
                if not self._cache:
                    raise _no_batch(self._loop) from None
                if self._loop.batch is None and isinstance(self._loop.batches, Iterator):
                    raise of_the_project(IndexError(position)) from None
                self._source, self._late = itertools.cycle(list(self._cache)), False
        return self._cache[position]


def _no_batch(loop: TrainLoop) -> UsageError | CannotDecide:
    """Of a loader that drops the only batch that it could give: ``data_order`` says so."""
    empty = _empty(loop.batches)
    if getattr(loop.batches, "drop_last", False) and not empty:
        return CannotDecide("TrainLoop.batches gives no batch, since it drops the last one: see data_order")
    return UsageError(f"TrainLoop.batches gave no batch{empty}; at least one is needed")


def _empty(batches: Any) -> str:
    """That the data set of a loader has no item."""
    try:
        return ": its data set has 0 items" if len(batches.dataset) == 0 else ""
    except Exception:  # of the length of the project's data, which may have none
        return ""


def _source(loop: TrainLoop, count: int) -> Iterator[Any]:
    if loop.batches is None:
        return itertools.repeat(loop.batch)
    given = loop.batches
    if callable(given) and not hasattr(given, "__iter__"):
        try:
            given = given(count)
        except Exception as error:  # of the project's batches(n)
            reraise_ours(error)
            raise UserCodeError(user_error(error, f"TrainLoop.batches({count})")) from error
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
        gave = " is" if given is loop.batches else f"({count}) gave"
        how = "a DataLoader, an iterable, or a function batches(n) is needed"
        raise loop.located(UsageError(f"TrainLoop.batches{gave} {nested.describe(given)}; {how}"))
    if loop.kept is not None and has_workers(given):
        return iter(loop.kept.through(given))
    return iter(given)


def first_batches(loop: TrainLoop, count: int) -> list[Any]:
    """The loop's own first batches; where it has too few, they begin again.

    They are those that a run under the seed of the loop is given. Raises ``UserCodeError`` where the project's own
    source of batches raises.
    """
    with SeededApart(loop.seed).in_use(), generators_kept(loop):
        source = _source(loop, count)
        try:
            given = list(itertools.islice(source, count))
        except Exception as error:  # of the project's data
            reraise_ours(error)
            raise UserCodeError(user_error(error, "TrainLoop.batches")) from error
    return [given[i % len(given)] for i in range(count)] if given else []


def first_batch(loop: TrainLoop) -> Any:
    """The example batch, or the first of the loop's own. Raises ``CannotDecide`` or ``UsageError`` where the
    loop gives none."""
    if loop.batch is not None:
        return loop.batch
    given = first_batches(loop, 1)
    if not given:
        raise _no_batch(loop)
    return given[0]


@contextlib.contextmanager
def generators_kept(loop: TrainLoop) -> Iterator[None]:
    """Put the generators that the loop's own loader draws from back at the end: where several loops share one, each
    begins with the same draws."""
    sampler = getattr(loop.batches, "batch_sampler", None)
    drawing = (loop.batches, getattr(loop.batches, "sampler", None), sampler, getattr(sampler, "sampler", None))
    found = [g for owner in drawing if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in found]
    try:
        yield
    finally:
        for generator, state in zip(found, states, strict=True):
            generator.set_state(state)
