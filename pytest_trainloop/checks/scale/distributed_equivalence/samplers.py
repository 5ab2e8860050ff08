"""What the DistributedSamplers of a rank share out."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class Shared:
    """What one sampler gave its rank. Plain data."""

    replicas: int
    seed: int
    shuffle: bool
    rows: tuple[int, ...] | None
    """The rows of the data set that it shares out, as a ``Subset`` names those of another; None where it is none."""
    count: int
    """How many rows it shares out."""
    order: tuple[int, ...] = ()
    """The rows of this rank in the first epoch."""


def noting(found: list[Shared]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps ``DistributedSampler.__iter__``."""
    known: list[Any] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterate(sampler: Any) -> Iterator[Any]:
            order = tuple(original(sampler))
            if not any(sampler is other for other in known):
                known.append(sampler)
                rows, count = _rows(sampler.dataset), len(sampler.dataset)
                found.append(Shared(sampler.num_replicas, sampler.seed, sampler.shuffle, rows, count, order))
            return iter(order)

        return iterate

    return wrap


def _rows(dataset: Any) -> tuple[int, ...] | None:
    """The rows of a ``Subset`` in the data set that it was taken from at last."""
    if not isinstance(dataset, Subset):
        return None
    inner = _rows(dataset.dataset)
    return tuple(int(i) if inner is None else inner[i] for i in dataset.indices)
