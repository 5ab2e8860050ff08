"""Clips of gradients by line: what they cover, how much they leave, whether they come in time. Plain data, no torch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.instruments.records.gradient_ledger import LOGGED_NORM, Ledger
from pytest_trainloop.recording.events import ClipCall, GradWrite, Place, Site, Step

if TYPE_CHECKING:
    from pytest_trainloop.instruments.records.gradient_ledger import Window
    from pytest_trainloop.recording.record import Record

LEAST_LEFT = 0.01
"""Share of the gradient that a clip must leave."""


@dataclass(frozen=True, slots=True)
class Clip:
    """What the clips of a loop leave of the gradient."""

    share: float
    """The median over the watched steps of the largest entry after the clip, over the one before."""
    limit: float
    by: str
    where: str

    @property
    def starves(self) -> bool:
        """Whether it leaves next to nothing."""
        return self.share <= LEAST_LEFT


@dataclass(frozen=True, slots=True)
class GroupLeftOut:
    """Tensors of one group of an optimizer that are stepped together with clipped ones and that no clip covers."""

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
    in_parts: bool = False
    """Whether a call of the line takes its tensors in parts, each with the limit for itself."""


def clipped_to(record: Record) -> Clip | None:
    """What the loop's clips leave, if there are any. All clips before one step count as one: a clip by value is two
    operations."""
    shares: list[float] = []
    clips: list[GradWrite] = []
    last: GradWrite | None = None
    for event in record.events:
        if isinstance(event, GradWrite) and event.how == "clipped" and event.before and event.after:
            clips.append(event)
        elif isinstance(event, Step) and clips:
            before = max(sample.peak for sample in clips[0].before.values())
            shares += [max(sample.peak for sample in clips[-1].after.values()) / before] if before > 0 else []
            last, clips = clips[-1], []
    if last is None or not shares:
        return None
    return Clip(statistics.median(shares), last.limit or 0.0, last.by, str(last.place))


def clips_by_site(record: Record) -> list[list[GradWrite]]:
    """The writes of clips that bite, by the line that they come from."""
    by_site: dict[Site, list[GradWrite]] = defaultdict(list)
    for w in record.of(GradWrite):
        if w.how == "clipped" and (w.changed if w.limit is None else w.limit < LOGGED_NORM):
            by_site[w.site].append(w)
    return list(by_site.values())


def late(ledger: Ledger, clips: list[GradWrite]) -> list[GradWrite]:
    """Those clips of one line that come after a step has read what they clip, where that is most of them."""
    last = [ledger.before(c.at, c.parameters, "read", "arrived", "assigned") for c in clips]
    after = [c for c, entry in zip(clips, last, strict=True) if entry is not None and entry.what == "read"]
    return after if len(after) >= 2 and 2 * len(after) > len(clips) else []


def by_line(record: Record) -> list[list[ClipCall]]:
    """The calls of torch's clips by the site that they were made from."""
    sites: dict[tuple[str, Site], list[ClipCall]] = defaultdict(list)
    for call in record.of(ClipCall):
        sites[call.by, call.site].append(call)
    return list(sites.values())


def clip_facts(record: Record) -> list[ClipFact]:
    """Every line that calls a clip of torch, in the order of the first calls."""
    ledger = Ledger(record)
    return [_fact(record, calls, ledger.windows) for calls in by_line(record)]


def _fact(record: Record, calls: list[ClipCall], windows: list[Window]) -> ClipFact:
    mine = [w for w in windows if any(c is call for c in w.clips for call in calls)]
    optimizers = {w.optimizer for w in mine}
    shares = [share for call in calls if not math.isnan(share := _left(call))]
    return ClipFact(
        place=calls[0].place,
        by=calls[0].by,
        limit=calls[0].limit,
        covers=len(set().union(*(c.found for c in calls))),
        of=len(set().union(*(w.stepped for w in windows if w.optimizer in optimizers))),
        bites=sum(map(bites, calls)),
        calls=len(calls),
        leaves=statistics.median(shares) if shares else math.nan,
        uncovered=share_left_out(mine),
        groups_left_out=tuple(g for o in sorted(optimizers) for g in groups_left_out(record, o, mine)),
        in_parts=any(len(call.parts) > 1 for call in calls),
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


def share_left_out(windows: list[Window]) -> float:
    """The share of |g|^2 of a step that no clip covers, the median; NaN where the norms are not known."""
    shares = []
    for window in windows:
        squares = {i: window.norms.get(i, math.nan) ** 2 for i in window.stepped}
        whole = sum(squares.values())
        shares += [sum(squares[i] for i in window.left_out) / whole] if 0.0 < whole < math.inf else []
    return statistics.median(shares) if shares else math.nan


def groups_left_out(record: Record, optimizer: int, windows: list[Window]) -> list[GroupLeftOut]:
    """The tensors that no clip covers in any of the optimizer's clipped windows, by group."""
    clipped = [w for w in windows if w.optimizer == optimizer and w.clips]
    held = record.optimizers[optimizer]
    group_of = dict(zip(held.parameters, held.groups, strict=False))
    stepped = set().union(*(w.stepped for w in clipped))
    by_group: dict[int, list[int]] = defaultdict(list)
    for index in sorted(i for i in stepped if all(i in w.left_out for w in clipped)):
        by_group[group_of.get(index, 0)].append(index)
    return [
        GroupLeftOut(
            group=group,
            of_groups=1 + max(held.groups, default=0),
            names=record.names(indices),
            of_tensors=sum(group_of.get(i, 0) == group for i in stepped),
            norm=statistics.median(math.sqrt(sum(w.norms.get(i, 0.0) ** 2 for i in indices)) for w in clipped),
        )
        for group, indices in sorted(by_group.items())
    ]
