"""Tensors that a clip leaves out, and clips inside of accumulation windows. Plain data, no torch."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.records.clip_coverage import bites, by_line, clip_windows, groups_left_out, limits, share_left_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import ClipCall
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.clip_coverage import GroupLeftOut, Window


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An optimizer of which clips cover some tensors and not others."""

    first: ClipCall
    kind: str
    steps: int
    """Steps that a clip came before."""
    groups: tuple[GroupLeftOut, ...]
    share: float
    """Of |g|^2, the median over the steps; NaN where the norms are not known."""
    split_by_decay: bool
    """Whether whole groups are left out that differ from those that are clipped in their weight decay only, and hold
    other tensors of the same modules."""


@dataclass(frozen=True, slots=True)
class ClipInside:
    """A line that clips what has been accumulated so far with every micro-batch."""

    first: ClipCall
    inner: int
    """Calls that another backward pass followed before the step."""
    calls: int
    bites: int
    """Inner calls that changed the gradients."""


def left_out(record: Record) -> Iterator[LeftOut]:
    """By optimizer, where at least two of its steps were clipped."""
    windows = clip_windows(record)
    for optimizer in record.optimizers:
        clipped = [w for w in windows if w.step.optimizer == optimizer.index and w.clips]
        groups = groups_left_out(record, optimizer.index, clipped) if len(clipped) >= 2 else []
        if not groups:
            continue
        shares = [s for w in clipped if not math.isnan(s := share_left_out(w))]
        yield LeftOut(
            first=clipped[0].clips[-1],
            kind=optimizer.kind,
            steps=len(clipped),
            groups=tuple(groups),
            share=statistics.median(shares) if shares else math.nan,
            split_by_decay=_split_by_decay(record, clipped, groups),
        )


def _split_by_decay(record: Record, clipped: list[Window], groups: list[GroupLeftOut]) -> bool:
    """A split by weight decay goes by the kind of tensor; one by part of the model may be clipped in part."""
    optimizer = record.optimizers[groups[0].optimizer]
    left = {g.group for g in groups}
    group_of = dict(zip(optimizer.parameters, optimizer.groups, strict=False))
    taken = {group_of[i] for w in clipped for i in w.covered if i in group_of}
    if not all(g.whole for g in groups) or left & taken or not taken or not optimizer.from_torch:
        return False
    decays = {g: optimizer.weight_decays[g] for g in left | taken}
    zero = {g for g, decay in decays.items() if decay == 0.0}
    alike = all(len({w.step.lrs[g] for g in left | taken}) == 1 for w in clipped)
    alike = alike and len({optimizer.eps[g] for g in left | taken}) == 1
    return alike and zero in (left, taken) and _by_kind(record, group_of, left, taken)


def _by_kind(record: Record, group_of: dict[int, int], left: set[int], taken: set[int]) -> bool:
    """Whether the groups hold matrices there and vectors here, or most of what is left out has its module's other
    tensors among what is taken."""
    mine = [p for p in record.parameters if group_of.get(p.index) in left]
    others = [p for p in record.parameters if group_of.get(p.index) in taken]
    vectors = [{len(p.shape) < 2 for p in side} for side in (mine, others)]
    owners = {p.owner for p in others if p.owner}
    beside = sum(p.owner in owners for p in mine)
    return vectors in ([{True}, {False}], [{False}, {True}]) or 2 * beside >= len(mine) > 0


def clips_inside(record: Record) -> Iterator[ClipInside]:
    """Lines that clip the same gradients again after another batch was added to them, at least twice."""
    for calls in by_line(record):
        inner = [a for a, b in itertools.pairwise(calls) if limits(a) and _goes_on(record, a, b)]
        if len(inner) >= 2:
            yield ClipInside(inner[0], len(inner), len(calls), sum(map(bites, inner)))


def _goes_on(record: Record, call: ClipCall, following: ClipCall) -> bool:
    """Whether between two calls nothing but a backward pass of another batch touched the gradients, and added to
    them."""
    mine = call.found & following.found
    added = [
        (b, i, a)
        for b in record.backwards()
        for i in mine & set(b.arrivals)
        for a in b.arrivals[i]
        if call.at < a.at < following.at
    ]
    if not added or any(a.residual is None or a.residual.zero for _, _, a in added):
        return False
    before = [b for b in record.backwards() if b.at < call.at and mine & set(b.arrivals)]
    stepped = any(
        call.at < r.at < following.at and mine & set(r.grads) for s in record.innermost_steps() for r in s.reads
    )
    return not stepped and bool(before) and all(b.item > before[-1].item for b, _, _ in added)
