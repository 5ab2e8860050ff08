"""What each clip of gradients covers, how often it bites, and which tensors no clip reaches. Plain data, no torch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import ClipCall, GradWrite, Place, Site, Step
from pytest_trainloop.records.clips import LOGGED_NORM
from pytest_trainloop.records.gradient_ledger import consuming_steps

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record


@dataclass(frozen=True, slots=True)
class GroupLeftOut:
    """Tensors of one group of an optimizer that are stepped beside clipped ones and that no clip covers."""

    optimizer: int
    group: int
    of_groups: int
    names: tuple[str, ...]
    of_tensors: int
    """Tensors of the group that were stepped with a gradient."""
    norm: float
    """The norm of their gradients, the median over the steps."""

    @property
    def tensors(self) -> int:
        return len(self.names)

    @property
    def whole(self) -> bool:
        return self.tensors == self.of_tensors


@dataclass(frozen=True, slots=True)
class ClipFact:
    """One line that clips gradients."""

    place: Place
    by: str
    """"clip_grad_norm_" or "clip_grad_value_"."""
    limit: float
    """Infinite, or above ``LOGGED_NORM``, where only the norm is logged."""
    covers: int
    """Tensors that it was given with a gradient."""
    of: int
    """Tensors that the same optimizers stepped with."""
    bites: int
    """Calls that changed a gradient."""
    calls: int
    leaves: float
    """The share of the norm that a call leaves, the median over its calls; NaN if it never found a gradient."""
    uncovered: float
    """The share of |g|^2 of these steps that no clip covers, the median over the steps; NaN if no step followed."""
    groups_left_out: tuple[GroupLeftOut, ...]
    apart: bool = False
    """Whether a call of the line takes its tensors in parts, each with the limit for itself."""


@dataclass(slots=True)
class Window:
    """What happened to the gradients of one optimizer from its step before to this one."""

    step: Step
    stepped: frozenset[int]
    """Tensors that the step read a gradient for that was not zero."""
    clips: list[ClipCall]
    """The calls that found a gradient of these."""
    covered: frozenset[int]
    """Those that a clip took, of torch or written by hand, or whose gradient was assigned by the loop."""
    norms: dict[int, float] = field(default_factory=dict)
    """The norms before the last of these calls."""

    @property
    def left_out(self) -> frozenset[int]:
        return self.stepped - self.covered


def limits(call: ClipCall) -> bool:
    """Whether a call is a clip, and not the norm for a log."""
    return call.limit < LOGGED_NORM


def clip_windows(record: Record) -> list[Window]:
    """The windows of all optimizers, those without a clip as well, in the order of the steps."""
    calls = [c for c in record.of(ClipCall) if limits(c) or math.isnan(c.limit)]
    writes = [w for w in record.of(GradWrite) if _by_hand(w)]
    last: dict[int, int] = defaultdict(int)
    windows = []
    for step in consuming_steps(record):
        since, until = last[step.optimizer], step.reads[-1].at
        last[step.optimizer] = until
        stepped = frozenset(i for i, g in step.reads[-1].grads.items() if g is not None and not g.zero)
        clips = [c for c in calls if since < c.at < until and c.found & stepped]
        covered = {i for c in clips for i in c.found}
        covered |= {i for w in writes if since < w.at < until for i in w.parameters}
        window = Window(step, stepped, clips, frozenset(covered & stepped))
        for clip in clips:
            window.norms.update(clip.norms)
        windows.append(window)
    return windows


def _by_hand(write: GradWrite) -> bool:
    """Whether the loop itself changed or assigned gradients, or clipped them by a function of its own."""
    if write.how == "clipped":
        return not write.by.startswith("clip_grad") or write.limit is None or write.limit < LOGGED_NORM
    return write.how in ("assigned", "altered")


def by_line(record: Record) -> list[list[ClipCall]]:
    """The calls of torch's clips by the site that they were made from."""
    sites: dict[tuple[str, Site], list[ClipCall]] = defaultdict(list)
    for call in record.of(ClipCall):
        sites[call.by, call.site].append(call)
    return list(sites.values())


def clip_facts(record: Record) -> list[ClipFact]:
    """Every line that calls a clip of torch, in the order of the first calls."""
    windows = clip_windows(record)
    return [_fact(record, calls, windows) for calls in by_line(record)]


def _fact(record: Record, calls: list[ClipCall], windows: list[Window]) -> ClipFact:
    mine = [w for w in windows if any(c is call for c in w.clips for call in calls)]
    optimizers = {w.step.optimizer for w in mine}
    found = set().union(*(c.found for c in calls))
    shares = [share for call in calls if not math.isnan(share := _left(call))]
    uncovered = [share for w in mine if not math.isnan(share := share_left_out(w))]
    return ClipFact(
        place=calls[0].place,
        by=calls[0].by,
        limit=calls[0].limit,
        covers=len(found),
        of=len(set().union(*(w.stepped for w in windows if w.step.optimizer in optimizers))),
        bites=sum(map(bites, calls)),
        calls=len(calls),
        leaves=statistics.median(shares) if shares else math.nan,
        uncovered=statistics.median(uncovered) if uncovered else math.nan,
        groups_left_out=tuple(g for o in sorted(optimizers) for g in groups_left_out(record, o, mine)),
        apart=any(len(call.parts) > 1 for call in calls),
    )


def bites(call: ClipCall) -> bool:
    """Whether a call changed a gradient: any part of it where it takes them in parts."""
    if call.left:
        return any(call.left.get(i, 0.0) < call.norms[i] * (1 - 1e-6) for i in call.found)
    return any(total > call.limit for total in call.totals)


def _left(call: ClipCall) -> float:
    """The share of the norm of all that it found that a call leaves; NaN where it found nothing."""
    before = math.sqrt(sum(call.norms[i] ** 2 for i in call.found))
    if not 0.0 < before < math.inf:
        return math.nan
    if call.left:
        after = math.sqrt(sum(call.left.get(i, 0.0) ** 2 for i in call.found))
        return 1.0 if math.isclose(after, before, rel_tol=1e-6) else after / before
    squares = 0.0
    for part, total in zip(call.parts, call.totals, strict=True):
        factor = min(1.0, call.limit / (total + 1e-6)) if total > 0 else 1.0
        squares += sum((factor * call.norms.get(i, 0.0)) ** 2 for i in part)
    return math.sqrt(squares) / before


def share_left_out(window: Window) -> float:
    """The share of |g|^2 of a step that no clip covers; NaN where the norms are not known."""
    squares = {i: window.norms.get(i, math.nan) ** 2 for i in window.stepped}
    whole = sum(squares.values())
    return sum(squares[i] for i in window.left_out) / whole if 0.0 < whole < math.inf else math.nan


def groups_left_out(record: Record, optimizer: int, windows: list[Window]) -> list[GroupLeftOut]:
    """The tensors that no clip covers in any of the optimizer's clipped windows, by group."""
    clipped = [w for w in windows if w.step.optimizer == optimizer and w.clips]
    if not clipped:
        return []
    held = record.optimizers[optimizer]
    group_of = dict(zip(held.parameters, held.groups, strict=False))
    left = set.intersection(*(set(w.left_out) for w in clipped))
    stepped = set().union(*(w.stepped for w in clipped))
    by_group: dict[int, list[int]] = defaultdict(list)
    for index in sorted(left):
        by_group[group_of.get(index, 0)].append(index)
    return [
        GroupLeftOut(
            optimizer=optimizer,
            group=group,
            of_groups=1 + max(held.groups, default=0),
            names=record.names(indices),
            of_tensors=sum(group_of.get(i, 0) == group for i in stepped),
            norm=statistics.median(math.sqrt(sum(w.norms.get(i, 0.0) ** 2 for i in indices)) for w in clipped),
        )
        for group, indices in sorted(by_group.items())
    ]
