"""What the ranks did over the loop's own batches: the same rows, other weights at the start, weights that part, files
that all write, draws that are the same on all. Plain data, no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.scale.distributed_equivalence.diagnosis import Diagnosis
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
    from pytest_trainloop.checks.scale.distributed_equivalence.samplers import Shared
    from pytest_trainloop.recording.record import Record

ROUNDING = {"float64": 2.2e-13, "float32": 1.2e-4}
"""A thousand machine epsilons: numbers that ranks reduce in another order may part by so much of their size. In lower
precision nothing is judged."""

STEPS = 2
"""Backward passes that must be the same before the rows are called so."""


def same_everywhere(dids: Sequence[Did]) -> int:
    """How many backward passes in a row, from the first, are the same on all ranks bit for bit: values and gradients.

    0 where fewer than two are, or some pass differs.
    """
    passes = [_passes(did.require()) for did in dids]
    count = min(map(len, passes))
    same = all(other[:count] == passes[0][:count] for other in passes[1:])
    return count if same and count >= STEPS else 0


def _passes(record: Record) -> list[object]:
    """The values and the incoming gradients of each backward pass, before anything is reduced."""
    return [
        (
            tuple(root.value for root in b.roots),
            tuple((plain(record.name(i)), *(a.incoming.raw for a in found)) for i, found in sorted(b.arrivals.items())),
        )
        for b in record.of(Backward)
        if b.arrivals
    ]


def starts_apart(dids: Sequence[Did]) -> tuple[str, ...]:
    """The weights and buffers that differ as ``fit`` begins, and still before the first step."""
    entered = set(_apart([did.seen.entered for did in dids], dids))
    return tuple(name for name in _apart([did.seen.first for did in dids], dids) if name in entered)


def ends_apart(dids: Sequence[Did]) -> tuple[str, ...]:
    """The weights and buffers that the ranks begin alike and that differ at the end, and did not come together again in
    between."""
    logs = [did.seen.digests for did in dids]
    count = min(map(len, logs))
    found = []
    if not count:  # some rank makes no step
        entered = set(_apart([did.seen.entered for did in dids], dids))
        return tuple(name for name in _apart([did.seen.last for did in dids], dids) if name not in entered)
    for name in _apart([did.seen.last for did in dids], dids):
        alike = [len({log[n].get(name) for log in logs}) == 1 for n in range(count)]
        if alike[0] and alike == sorted(alike, reverse=True):
            found.append(name)
    return tuple(found)


def come_together(dids: Sequence[Did], names: Sequence[str]) -> bool:
    """Whether these weights are the same on all ranks after some step."""
    logs = [did.seen.digests for did in dids]
    return any(
        all(len({log[n].get(name) for log in logs}) == 1 for name in names) for n in range(1, min(map(len, logs)))
    )


def _apart(sides: Sequence[dict[str, tuple[float, ...]]], dids: Sequence[Did]) -> Iterator[str]:
    """The names of which some entry differs by more than rounding."""
    dtypes = {plain(p.name): p.dtype for p in dids[0].require().parameters}
    for name, first in sides[0].items():
        if not all(name in other and len(other[name]) == len(first) for other in sides[1:]):
            continue
        share = ROUNDING.get(dtypes.get(name, "float32"), math.inf)
        limit = share * max((abs(x) for x in first), default=0.0)
        if any(abs(a - b) > limit for other in sides[1:] for a, b in zip(first, other[name], strict=True)):
            yield name


def of_start(names: Sequence[str], *, only_by_seed: bool) -> Diagnosis:
    """Weights or buffers that differ before the first step."""
    return Diagnosis(
        "start_differs",
        f"the ranks begin with different values of {some(names, most=3)}"
        f"{': they follow the seed of each rank, and nothing brings them together' if only_by_seed else ''}",
        "under one seed on all ranks they are the same" if only_by_seed else "also under one seed on all ranks",
        level="advice" if only_by_seed else "fault",
        culprits=tuple(names),
    )


def of_files(dids: Sequence[Did]) -> Iterator[Diagnosis]:
    """Files that several ranks write."""
    for path in dict.fromkeys(p for did in dids for p in did.seen.written):
        places = [did.seen.written[path] for did in dids if path in did.seen.written]
        if len(places) > 1:
            name = path.replace("\\", "/").rpartition("/")[2]
            yield Diagnosis(
                "written_by_every_rank",
                f"{len(places)} ranks write one and the same file, {name}: the last one wins, or they mix",
                "the path is the same on all of them",
                culprits=(name,),
                where=str(places[0]),
            )


def of_draws(dids: Sequence[Did]) -> Iterator[Diagnosis]:
    """Lines at which every rank draws the same."""
    logs = [did.seen.draws for did in dids]
    for place, drawn in logs[0].items():
        fresh = len(set(drawn)) > 1  # else it is a constant, whatever draws it
        if fresh and place.file and all(other.get(place) == drawn for other in logs[1:]):
            yield Diagnosis(
                "same_draws_on_every_rank",
                "every rank draws the same random numbers here, for different rows",
                "the ranks were given different seeds: the loop seeds them alike",
                level="advice",
                where=str(place),
            )


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
