"""The DistributedSamplers of the ranks: whether they share one data set out, each row once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from pytest_trainloop.checks.scale.distributed_equivalence.diagnosis import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did


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


def of_samplers(dids: Sequence[Did]) -> Iterator[Diagnosis]:
    """Rows that several ranks go over in one epoch, or none does."""
    world = len(dids)
    for shares in zip(*(did.seen.samplers for did in dids), strict=False):
        if any(s.replicas != world for s in shares):
            continue
        if len({s.rows for s in shares}) > 1:
            yield _other_data(shares)
        elif len({s.seed for s in shares}) > 1 and all(s.shuffle for s in shares):
            yield _other_seeds(shares)


def _other_data(shares: Sequence[Shared]) -> Diagnosis:
    common = len(set.intersection(*(set(s.rows or range(s.count)) for s in shares)))
    return Diagnosis(
        "rows_left_out",
        f"DistributedSampler shares out a data set that is already another on each rank, with {common} rows in common: "
        f"of its own part each rank goes over one row in {len(shares)}",
        f"the subsets that the samplers were given, of {', '.join(str(s.count) for s in shares)} rows",
        repair="give DistributedSampler the same data set on all ranks: cut it by rank once, and draw splits with a "
        "generator of one seed",
    )


def _other_seeds(shares: Sequence[Shared]) -> Diagnosis:
    twice = len(set.intersection(*(set(s.order) for s in shares)))
    never = shares[0].count - len(set().union(*(s.order for s in shares)))
    return Diagnosis(
        "rows_left_out",
        f"in one epoch {twice} of {shares[0].count} rows are on all ranks, and {never} on none",
        f"DistributedSampler has the seeds {', '.join(str(s.seed) for s in shares)}, and cuts one order per seed",
        repair="DistributedSampler(dataset, seed=seed) with the same seed on all ranks",
    )
