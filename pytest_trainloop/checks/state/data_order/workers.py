"""Loaders with worker processes: whether each gives all the data, and whether all draw the same numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from pytest_trainloop.checks.state.data_order.held import Held
from pytest_trainloop.checks.state.data_order.rows import digest
from pytest_trainloop.checks.state.data_order.streams import MOST_ROWS, read
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.whose import reraise_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pytest_trainloop.checks.state.data_order.streams import Reading


@dataclass(frozen=True, slots=True)
class Duplicated:
    """An iterable data set that every worker gives in whole."""

    workers: int
    rows: int
    """With one process."""


def is_iterable(loader: Any) -> bool:
    """Whether the data set is one that only iterates."""
    return isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__")


def duplicated(loader: Any, alone: Reading, *, axis: int, pads: Collection[int]) -> Duplicated | None:
    """Whether the loader with its workers gives as many times the rows of ``alone``, which was read without any, as it
    has workers."""
    k, first = loader.num_workers, alone.epochs[0] if alone.epochs else None
    if k < 2 or not is_iterable(loader) or first is None or not first.complete or not alone.identity:
        return None
    rows = Counter(alone.rows(0))
    if not rows or k * first.rows > MOST_ROWS:
        return None
    with started():
        together = read(lambda: loader, axis=axis, pads=pads, epochs=1)
    if together.raised is not None:
        raise _not_started(together.raised)
    name = alone.identity
    if not together.epochs[0].complete or name not in together.epochs[0].leaves:
        return None
    all_rows = Counter(together.epochs[0].column(name))
    return Duplicated(k, first.rows) if all_rows == Counter({row: k * n for row, n in rows.items()}) else None


@dataclass(frozen=True, slots=True)
class SharedRandomness:
    """What workers draw alike."""

    across_workers: bool
    """Whether two workers draw the same numbers; else each draws the same in every epoch."""
    setter: str
    """The project's function that seeds them, if there is one."""
    generator: str
    """A generator that the data set holds."""


def shared_randomness(loader: Any, index: Any) -> SharedRandomness | None:
    """Fetch one item four times by two workers: each worker's second differs from its first, and both workers' are the
    same. Then again, as the next epoch does."""
    if loader.num_workers < 1 or is_iterable(loader):
        return None
    generators = Held.by(("dataset", loader.dataset)).generators
    if not generators and not _draws(lambda: loader.dataset[index]):
        return None
    with started():
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
    (a, b, c, d), again = epochs
    seeder = getattr(loader.worker_init_fn, "__name__", type(loader.worker_init_fn).__name__)
    setter = "" if loader.worker_init_fn is None else seeder
    if a == c or b == d:
        return None
    if loader.num_workers > 1 and (a, c) == (b, d):
        return SharedRandomness(True, setter, next(iter(generators), ""))
    if again == [a, b, c, d]:
        return SharedRandomness(False, setter, next(iter(generators), ""))
    return None


def _as_they_are(items: Any) -> Any:
    return items


def _draws(fetch: Callable[[], Any]) -> bool:
    """Whether an item depends on the generators of the process, and on nothing that goes on from call to call."""
    with preserved():
        found = []
        for seed in (1, 1, 2, 3):
            seed_all(seed)
            found.append(digest(fetch()))
    return found[0] == found[1] and len(set(found)) > 1


@contextlib.contextmanager
def started() -> Any:
    """Around what starts workers: warnings of too many of them are none of the project's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _not_started(error: BaseException) -> CannotDecide:
    return CannotDecide(
        f"workers cannot be started here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}): "
        "run where processes can be forked, or give what the loader holds at the top of a module"
    )
