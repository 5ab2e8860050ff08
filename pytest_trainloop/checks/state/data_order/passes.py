"""The passes over DataLoaders while a block runs: the order of each, what drew it, and the steps made meanwhile.

The order is that of the indices that the sampler hands out, whatever sampler that is. What it draws is seen where the
indices are asked for: an augmentation draws later, where the batch is fetched.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.state.data_order.draws import IN_SAMPLERS, orders_drawn, others_noted
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import loader_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class Pass:
    """One pass over a DataLoader. Plain data: nothing of the project is held."""

    loader: int
    """The number of the loader: those over one data set that are iterated by one line count as one."""
    where: str
    """The line that asked for the iterator."""
    sampler: str
    """The class of the sampler that gives the order."""
    set_epoch: str
    """What has a method ``set_epoch``, as one would write it after the loader: "sampler", "batch_sampler"."""
    steps_at: list[int] = field(default_factory=list)
    """Optimizer steps made when each batch was handed out."""
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
    _last: Any = None

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
        try:
            self.order = hash((self.order, tuple(indices)))
        except TypeError:
            self.order = hash((self.order, repr(indices)))
        self.rows += len(indices)
        for one in indices:
            number = one if isinstance(one, int) else None
            self.ascending = self.ascending and number is not None and (self._last is None or number >= self._last)
            self._last = number


class LoaderPasses:
    """Notes the passes in a block; ``steps`` gives the optimizer steps so far, ``ignored`` what is not the loop's."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self._numbers: dict[tuple[int, str], int] = {}
        self._held: list[Any] = []
        self._under_way: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        self._looked_for_cycle: set[int] = set()

    @contextlib.contextmanager
    def noting(
        self, steps: Callable[[], int] = lambda: 0, ignored: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Note passes in the block; what identifies a loader is let go of at its end."""
        kind, names = loader_calls()
        with others_noted(), Patches() as patches:
            patches.put(kind, names["begin"], functools.partial(self._begun, ignored))
            patches.put(kind, names["again"], functools.partial(self._begun_again, ignored))
            patches.put(kind, names["indices"], self._drawn)
            patches.put(kind, names["next"], functools.partial(self._next, steps))
            try:
                yield
            finally:
                for one in self.passes:
                    one.steps_after = steps()
                self._held.clear()
                self._under_way.clear()

    def _begun(self, ignored: Callable[[], bool], original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def begin(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
            if ignored():
                return original(iterator, loader, *args, **kwargs)
            noted = self._enter(iterator, loader)
            with orders_drawn(noted.draws, IN_SAMPLERS):
                return original(iterator, loader, *args, **kwargs)

        return begin

    def _begun_again(self, ignored: Callable[[], bool], original: Callable[..., Any]) -> Any:
        """Workers that live on reset one iterator at each pass; the first time belongs to its making."""

        @functools.wraps(original)
        def again(iterator: Any, loader: Any, first_iter: bool = False) -> Any:
            if first_iter or ignored() or iterator not in self._under_way:
                return original(iterator, loader, first_iter)
            noted = self._enter(iterator, loader)
            with orders_drawn(noted.draws, IN_SAMPLERS):
                return original(iterator, loader, first_iter)

        return again

    def _enter(self, iterator: Any, loader: Any) -> Pass:
        place = str(here()[0])
        key = (id(getattr(loader, "dataset", loader)), place)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._held.append(getattr(loader, "dataset", loader))
        sampler, setter = order_of(loader), epoch_setter(loader)[0]
        noted = Pass(
            self._numbers[key],
            place,
            type(sampler).__name__,
            setter,
        )
        self.passes.append(noted)
        self._under_way[iterator] = noted
        return noted

    def _drawn(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def indices(iterator: Any) -> Any:
            noted = self._under_way.get(iterator)
            if noted is None:
                return original(iterator)
            with orders_drawn(noted.draws, IN_SAMPLERS):
                index = original(iterator)
            noted.take(index)
            return index

        return indices

    def _next(self, steps: Callable[[], int], original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def step(iterator: Any) -> Any:
            noted = self._under_way.get(iterator)
            if noted is None:
                return original(iterator)
            try:
                batch = original(iterator)
            except StopIteration:
                if not noted.complete:
                    noted.complete = True
                    noted.steps_at.append(steps())
                    if noted.draws and noted.loader not in self._looked_for_cycle:  # once: it goes through all objects
                        self._looked_for_cycle.add(noted.loader)
                        noted.kept_by_cycle = _in_cycle(iterator)
                raise
            noted.steps_at.append(steps())
            return batch

        return step


def order_of(loader: Any) -> Any:
    """What gives the order: the sampler, or a batch sampler of its own."""
    from torch.utils.data import BatchSampler

    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return getattr(batch_sampler, "sampler", None) or batch_sampler
    return getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)


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


def _in_cycle(iterator: Any) -> bool:
    return any(type(holder) is itertools.cycle for holder in gc.get_referrers(iterator))
