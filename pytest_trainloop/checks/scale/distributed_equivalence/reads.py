"""The gradients that the first steps of the ranks read, put together by the names of the parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.gradients.compare import optimizers
from pytest_trainloop.gradients.vectors import consumed, steps_of, values
from pytest_trainloop.recording.events import ClipCall, Step
from pytest_trainloop.recording.plain_names import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
    from pytest_trainloop.gradients.vectors import Gradient
    from pytest_trainloop.recording.record import Record

Shards = dict[str, tuple[tuple[int, ...], tuple[float, ...], int]]


def first_read(record: Record, *, before_clip: bool = False) -> Gradient:
    """What the first step of each parameter reads in one process, as it is or as it was before any clipping."""
    found: Gradient = {}
    for optimizer in optimizers(record):
        if before_clip:
            read = consumed(record, optimizer, 0) or {}
        else:
            samples = steps_of(record, optimizer)[0].reads[0].grads
            read = {
                record.name(i): values(s, record.parameters[i].dtype)
                for i, s in samples.items()
                if s is not None and s.raw and not s.sparse
            }
        for name, entries in read.items():
            found.setdefault(plain(name), entries)
    return found


def first_reads(dids: Sequence[Did], *, before_clip: bool = False) -> list[Gradient]:
    """The same by rank. A parameter that no optimizer of a rank steps is taken from a rank that steps it: ranks may
    share the steps out; so are the shards that a rank does not hold."""
    reads = [first_read(did.require(), before_clip=before_clip) for did in dids]
    whole = _joined([did.seen.shards for did in dids])
    stepped = [_stepped(did.require()) for did in dids]
    for did, read in zip(dids, reads, strict=True):
        for name in did.seen.shards:
            read.pop(name, None)  # a part
        read.update(whole)
    for rank, read in enumerate(reads):
        for other in reads:
            for name, entries in other.items():
                if name not in read and name not in stepped[rank]:
                    read[name] = entries
    return reads


def ends_of(dids: Sequence[Did]) -> list[Gradient]:
    """The weights at the end of each rank."""
    whole = _joined([did.seen.ends for did in dids])
    parts = {name for did in dids for name in did.seen.ends}
    ends = (last_weights(did.require()) for did in dids)
    return [{name: entries for name, entries in end.items() if name not in parts} | whole for end in ends]


def last_weights(record: Record) -> Gradient:
    return {
        plain(p.name): values(record.end[p.index], p.dtype)
        for p in record.parameters
        if p.index in record.end and record.end[p.index].raw
    }


def first_arrivals(record: Record) -> Gradient:
    """What the first backward pass brings to each parameter, before ranks exchange anything."""
    first = next((b for b in record.backwards() if b.arrivals), None)
    return {
        plain(record.name(i)): values(found[0].incoming, record.parameters[i].dtype)
        for i, found in (first.arrivals if first is not None else {}).items()
        if found and found[0].incoming.raw and not found[0].incoming.sparse
    }


def first_loss(record: Record) -> float:
    """What the first backward pass begins with, summed; NaN where nothing is known of it."""
    first = next((b for b in record.backwards() if b.arrivals), None)
    values = [root.value for root in first.roots] if first is not None else []
    return sum(values) if values else math.nan


def clip_norms(record: Record) -> tuple[tuple[float, ...], str]:
    """The norms that torch's clips by norm found before the first step, and the line of the first one."""
    first = min((s.reads[0].at for o in optimizers(record) for s in steps_of(record, o)[:1]), default=0)
    calls = [c for c in record.of(ClipCall) if c.at < first and c.by == "clip_grad_norm_" and c.limit < float("inf")]
    return tuple(n for c in calls for n in c.totals), str(calls[0].place) if calls else ""


def _stepped(record: Record) -> set[str]:
    """The parameters that the innermost steps of a rank hold."""
    steps = (s for s in record.of(Step) if not s.nested and s.reads)
    return {plain(record.name(i)) for s in steps for i in s.reads[0].grads}


def _joined(parts: Sequence[Shards]) -> Gradient:
    """Whole samples from the shards of all ranks; one with an entry that no rank holds is left out."""
    made: Gradient = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        count = next(part[name][2] for part in parts if name in part)
        entries = torch.full((count,), math.nan, dtype=torch.float64)
        for numbers, held, _ in (part[name] for part in parts if name in part):
            entries[list(numbers)] = torch.tensor(held, dtype=torch.float64)
        if not bool(entries.isnan().any()):
            made[name] = entries
    return made
