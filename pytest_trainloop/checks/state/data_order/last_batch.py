"""The batch that ends an epoch with fewer rows, given to ``fit``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.state.data_order.streams import MOST_BATCHES, in_this_process, sizes
from pytest_trainloop.runs.batch_stream import generators_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.data_order.streams import Epoch
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

STEPS = 2
"""Optimizer steps of a run."""


@dataclass(frozen=True, slots=True)
class LastRaises:
    """What ``fit`` raises on the last batch."""

    rows: int
    full: int
    """Rows of the other batches."""
    summary: str
    where: str


def is_smaller(epoch: Epoch) -> bool:
    """Whether a whole epoch ends with a batch of fewer rows than all others, which are of one size."""
    counts = sizes(epoch.batches)
    return epoch.complete and len(counts) > 1 and len(set(counts[:-1])) == 1 and 0 < counts[-1] < counts[0]


def last_raises(evidence: Evidence, epoch: Epoch) -> LastRaises | None:
    """Run ``fit`` on a full batch and the last one in turn, and where that raises on full ones alone."""
    counts = sizes(epoch.batches)

    def last(loop: TrainLoop) -> Iterator[Any]:
        ends = _ends(loop)
        return itertools.cycle(ends)

    def full(loop: TrainLoop) -> Iterator[Any]:
        return itertools.cycle(_ends(loop)[:1])

    enough: dict[str, Any] = {"enough": lambda record: record.rounds >= STEPS, "may_raise": True}
    ended = evidence.rerun(stream=last, **enough).raised
    if ended is None or ended.place.code.startswith(("raise", "assert ")):
        return None
    if evidence.rerun(stream=full, **enough).raised is not None:
        return None
    return LastRaises(counts[-1], counts[0], ended.summary, str(ended.place))


def _ends(loop: TrainLoop) -> list[Any]:
    """The first batch of an epoch and the last."""
    with generators_kept(loop):
        batches = list(itertools.islice(in_this_process(loop.batches), MOST_BATCHES))
    return [batches[0], batches[-1]]
