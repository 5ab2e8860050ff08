"""The batch that the project's own loader ends an epoch with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.whose import reraise_ours

MOST = 1_000_000
"""Rows of a data set whose order is read, at most."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a loader ends an epoch. Of a loader with an order of its own only ``drops`` is known."""

    drops: bool = False
    """Whether a batch that is not full is dropped."""
    last: tuple[Any, ...] | None = None
    """The indices of the last batch."""
    batch_size: int = 0
    data: int = 0
    """Rows of the data set."""
    shuffles: bool = False
    """Whether another epoch ends with other indices."""

    @property
    def rows(self) -> int:
        return len(self.last or ())

    @property
    def leaves_one(self) -> bool:
        return not self.drops and self.rows == 1 < self.batch_size

    @property
    def leaves_any(self) -> bool:
        """Whether any row may be the one that is left."""
        return self.leaves_one and self.shuffles

    @property
    def leaves_none(self) -> bool:
        """Whether it is known that no batch of one row comes."""
        return self.drops or (self.last is not None and not self.leaves_one)


def ending(batches: Any) -> Ending:
    """How this loader ends an epoch; of any other iterable only whether it has ``drop_last``."""
    sampler = batches.batch_sampler if isinstance(batches, DataLoader) else None
    drops = bool(getattr(batches if sampler is None else sampler, "drop_last", False))
    if not isinstance(batches, DataLoader) or type(sampler) is not BatchSampler:
        return Ending(drops)
    try:
        data = len(sampler.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return Ending(drops)
    if not 0 < data <= MOST or not hasattr(batches.dataset, "__getitem__"):
        return Ending(drops)
    rows = data % sampler.batch_size or sampler.batch_size
    shuffles = type(sampler.sampler) is not SequentialSampler
    return Ending(drops, tuple(sampler.sampler)[-rows:], sampler.batch_size, data, shuffles)


def last_batch(batches: Any, end: Ending) -> Any:
    """The batch that the loader makes of these indices. Raises ``CannotDecide`` where its data set does not give it."""
    indices, several = list(end.last or ()), getattr(batches.dataset, "__getitems__", None)
    try:
        return batches.collate_fn(several(indices) if several else [batches.dataset[index] for index in indices])
    except Exception as error:  # of the project's data set or collate function
        reraise_ours(error)
        raise CannotDecide(f"the loader's last batch cannot be composed: {type(error).__name__}: {error}") from error
