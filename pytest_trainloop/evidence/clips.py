"""How much of the gradient a clip leaves."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.observe.events import GradWrite

if TYPE_CHECKING:
    from pytest_trainloop.observe.record import Record


@dataclass(frozen=True, slots=True)
class Clip:
    """``share`` is the median over the watched steps of the largest entry after the clip, over the one before."""

    share: float
    limit: float
    by: str
    where: str


def clipped_to(record: Record) -> Clip | None:
    """What the loop's clips leave, if there are any."""
    clips = [w for w in record.of(GradWrite) if w.how == "clipped" and w.before and w.after]
    shares = []
    for write in clips:
        before = max((f.peak for f in write.before.values()), default=0.0)
        after = max((f.peak for f in write.after.values()), default=0.0)
        if before > 0:
            shares.append(after / before)
    if not shares:
        return None
    last = clips[-1]
    return Clip(statistics.median(shares), last.limit or 0.0, last.by, str(last.place))
