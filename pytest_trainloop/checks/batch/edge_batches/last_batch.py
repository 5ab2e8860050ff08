"""What a project's own loader says of the batch that it ends an epoch with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from pytest_trainloop.errors import CannotDecide

MOST = 1_000_000
"""Rows of a data set whose order is asked for."""


@dataclass(frozen=True, slots=True)
class Ending:
    """``drops``: no batch that is not full is given. Of a loader whose arithmetic is torch's own ``last`` holds the
    indices of the last batch, ``of`` is the size of a full one and ``data`` that of the data set; ``shuffles``: in
    another epoch these are others."""

    drops: bool = False
    last: tuple[Any, ...] | None = None
    of: int = 0
    data: int = 0
    shuffles: bool = False

    @property
    def rows(self) -> int:
        return len(self.last or ())

    @property
    def leaves_one(self) -> bool:
        return not self.drops and self.rows == 1 < self.of

    @property
    def leaves_any(self) -> bool:
        """Whether any row may be the one that is left."""
        return self.leaves_one and self.shuffles

    @property
    def leaves_none(self) -> bool:
        """Whether it is known that no batch of one row comes."""
        return self.drops or (self.last is not None and not self.leaves_one)


def ending(batches: Any) -> Ending:
    """What a loader tells; of anything else only whether it says that it drops the last batch."""
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
    except Exception as error:
        raise CannotDecide(
            f"the loader's last batch cannot be made by hand: {type(error).__name__}: {error}"
        ) from error
