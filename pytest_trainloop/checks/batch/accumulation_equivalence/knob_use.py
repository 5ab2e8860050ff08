"""Whether the loop uses its knob ``accumulate`` at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import Refused
from pytest_trainloop.recording.events import Backward, Step

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

SIZES = (2, 3)
"""Values of the knob that are tried besides its default, which may be one of them."""

ENOUGH = 3
"""Steps that the runs must have in common: equal weights after several of them need equal steps."""


def knob_unused(evidence: Evidence) -> bool:
    """Whether runs over the same batches backpropagate and step the same, bit for bit, whatever the knob is."""
    first = _course(evidence.run())
    for size in SIZES:
        try:
            other = _course(evidence.run(accumulate=size))
        except Refused:  # it is read, at least
            return False
        length = min(len(first), len(other))
        if first[:length] != other[:length] or sum(not values for values in other[:length]) < ENOUGH:
            return False
    return True


def _course(record: Record) -> list[tuple[float | None, ...]]:
    """Backward passes with the values that they start from, and steps, in order."""
    events = sorted([*record.of(Backward), *record.of(Step)], key=lambda event: event.at)
    return [tuple(root.value for root in e.roots) if isinstance(e, Backward) else () for e in events]
