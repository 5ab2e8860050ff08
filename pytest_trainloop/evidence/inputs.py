"""Whether a model can use its input: what plain Adam makes of a batch whose rows are all the first (RULINGS R6)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.evidence.learning import LITTLE, SAME

if TYPE_CHECKING:
    from pytest_trainloop.evidence.learning import Learning
    from pytest_trainloop.evidence.onebatch import OneBatch
    from pytest_trainloop.observe.record import Record


def unused(batch: OneBatch, found: Learning) -> float | None:
    """The loss that is reached with all rows alike, if it is the one that is reached with the rows as they are.

    Nothing is said where plain Adam halves the loss; where fewer weights train than twice the rows (a small model may
    learn next to nothing of many rows); where targets are made by weights that are not trained but moved.
    """
    if found.start <= 0 or found.reference <= found.start / 2:
        return None
    if _trained(batch.seen) < 2 * batch.rows or batch.seen.moved_by_hand() - set(batch.seen.held):
        return None
    curve, made = batch.rows_alike(found.rate)
    if not made or not math.isfinite(curve.end):
        return None
    way = max(found.start - found.reference, LITTLE * found.start)
    return curve.end if abs(curve.end - found.reference) <= SAME * way else None


def _trained(record: Record) -> int:
    """How many weights the optimizers hold."""
    return sum(math.prod(record.parameters[i].shape) for i in record.held)
