"""Clips of gradients: on which line, whether before or after the step, and how much they leave."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import Backward, GradWrite, Site, Step

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record


LEAST = 0.01
"""Share of the gradient that a clip must leave."""

LOGGED_NORM = 1e5
"""Limit from which a clip only computes the norm for a log: no training clips gradients there."""


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
        return self.share <= LEAST


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
    """The clips that bite, by the line that they come from."""
    by_site: dict[Site, list[GradWrite]] = defaultdict(list)
    for write in record.of(GradWrite):
        if write.how == "clipped" and _bites(write):
            by_site[write.site].append(write)
    return list(by_site.values())


def _bites(clip: GradWrite) -> bool:
    if clip.limit is None:
        return clip.changed
    return math.isfinite(clip.limit) and clip.limit < LOGGED_NORM


def comes_after_step(record: Record, clip: GradWrite) -> bool:
    """Whether what happened last to the clipped gradients is that a step consumed them."""
    mine = set(clip.parameters)
    for event in reversed(record.events):
        if event.at >= clip.at:
            continue
        if isinstance(event, Step) and event.reads and event.consumes and not event.nested:
            if any(event.reads[-1].grads.get(i) is not None for i in mine):
                return event.until > 0
        elif isinstance(event, Backward) and mine & set(event.arrivals):
            return False
        elif isinstance(event, GradWrite) and event.assigns and mine & set(event.parameters):
            return False  # gradients copied in, as into master weights
    return False
