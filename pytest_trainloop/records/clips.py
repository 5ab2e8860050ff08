"""How much of the gradient a clip leaves."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import GradWrite, Step

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record


LEAST = 0.01
"""Share of the gradient that a clip must leave."""


@dataclass(frozen=True, slots=True)
class Clip:
    """``share`` is the median over the watched steps of the largest entry after the clip, over the one before."""

    share: float
    limit: float
    by: str
    where: str

    @property
    def starves(self) -> bool:
        """Whether it leaves next to nothing."""
        return self.share <= LEAST


def clipped_to(record: Record) -> Clip | None:
    """What the loop's clips leave, if there are any. All clips before one step count as one: a clip by value takes
    two operations."""
    shares: list[float] = []
    clips: list[GradWrite] = []
    last: GradWrite | None = None
    for event in record.events:
        if isinstance(event, GradWrite) and event.how == "clipped" and event.before and event.after:
            clips.append(event)
        elif isinstance(event, Step) and clips:
            before = max(fact.peak for fact in clips[0].before.values())
            shares += [max(fact.peak for fact in clips[-1].after.values()) / before] if before > 0 else []
            last, clips = clips[-1], []
    if last is None or not shares:
        return None
    return Clip(statistics.median(shares), last.limit or 0.0, last.by, str(last.place))
