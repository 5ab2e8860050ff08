"""Whether a model can use its input: what plain Adam makes of it when its rows are others.

See docs/how-it-decides.md#one-fixed-batch.

Two observations must meet. With every row the first, plain Adam comes to the same loss as with the rows as they are.
And with each row in its neighbour's place, while the labels stay in theirs, it takes the very same way there: which
row belongs to which label does not matter. A batch of noise fails the second (other pairs are other numbers, however
little can be learned of them), a loss without labels the first. Labels must count: where the first row's replace
all rows, plain Adam must come elsewhere (a loss that pulls all rows to one place has none).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.one_batch import LITTLE
from pytest_trainloop.checks.learning.outcome import SAME

if TYPE_CHECKING:
    from pytest_trainloop.checks.learning.one_batch import Curve, OneBatch
    from pytest_trainloop.checks.learning.outcome import Learning
    from pytest_trainloop.recording.record import Record

EQUAL = 1e-9
"""Relative difference of two losses in float64 that are one: rounding of sums in another order, through 24 steps."""


def unused(batch: OneBatch, found: Learning) -> float | None:
    """The loss that is reached with equal inputs in all rows, if the model cannot use its input.

    Nothing is said where plain Adam halves the loss; where fewer weights train than twice the rows (a small model may
    learn next to nothing of many rows); where targets are made by weights that are not trained but moved; where the
    loop makes its own data, so that the rows of the batch are none of the model's. Where plain
    Adam hardly lowers the loss at all, the batch must hold labels that differ, and no other net may make targets.
    """
    if found.start <= 0 or found.reference <= found.start / 2 or batch.own_data():
        return None
    if _trained(batch.seen) < 2 * batch.rows or batch.seen.moved_outside_steps() - set(batch.seen.held):
        return None
    labelled = batch.differing >= 2 and all(f.grad_enabled for f in batch.seen.root_forwards())
    if found.hopeless and not labelled:
        return None
    straight, rolled, made = batch.rows_rolled(found.lr)
    if labelled and batch.lost_before:
        return found.reference
    if not made or not _same_way(rolled, straight):
        return None
    one_input, made = batch.with_equal_inputs(found.lr)
    way = max(found.start - found.reference, LITTLE * found.start)
    if not made or abs(one_input.end - found.reference) > SAME * way:
        return None
    labels_count = abs(batch.one_row(found.lr).end - one_input.end) > SAME * way
    return one_input.end if labels_count else None


def _same_way(a: Curve, b: Curve) -> bool:
    pairs = list(zip(a.losses, b.losses, strict=False))
    return bool(pairs) and all(math.isfinite(x) and abs(x - y) <= EQUAL * abs(y) for x, y in pairs)


def _trained(record: Record) -> int:
    """How many weights the optimizers hold."""
    return sum(math.prod(record.parameters[i].shape) for i in record.held)
