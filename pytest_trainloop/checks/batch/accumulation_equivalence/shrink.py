"""The smallest composition of rows over which windows of micro-batches still show the same fault.

The search tries at most ``TRIES`` compositions, of two runs each: one row in each micro-batch, then two; of each size
first rows with equal numbers of valid targets, then one micro-batch with another number. The verdict is made before
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.accumulation_equivalence.weights import CLOSE
from pytest_trainloop.errors import CannotDecide, Unreliable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.batches.valid_targets import ValidTargets
    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation, Split

TRIES = 4

SHOWN = 8
"""Rows that are listed one by one."""


def smallest(made: Accumulation, split: Split) -> str:
    """The smallest composition in words: ``rows [3] | [1]; 7 against 2 valid targets``."""
    for _, rows in zip(range(TRIES), _compositions(made.cut.valid, split), strict=False):
        other = made.over(rows)
        try:
            found = other.split(split.accumulate, rows=len(rows))
        except (CannotDecide, Unreliable):
            continue
        if _same_fault(found, split):
            return _described(other, found)
    return _described(made, split)


def _compositions(valid: ValidTargets, split: Split) -> Iterator[tuple[int, ...]]:
    """Rows for the micro-batches, in order; fewer than the split has."""
    k, size = split.accumulate, 1
    tried: set[tuple[int, ...]] = set()
    while size * k < split.rows:
        for rows in (_equal_counts(valid, size * k), (*valid.order[: (k - 1) * size], *valid.order[-size:])):
            if rows and rows not in tried:
                tried.add(rows)
                yield rows
        size *= 2


def _equal_counts(valid: ValidTargets, number: int) -> tuple[int, ...]:
    """The first ``number`` rows with equal counts; of any rows where nothing is counted."""
    counts = valid.counts[0] if valid.counts else [0] * len(valid.order)
    for count in dict.fromkeys(counts[row] for row in valid.order):
        rows = [row for row in valid.order if counts[row] == count]
        if len(rows) >= number:
            return tuple(rows[:number])
    return ()


def _same_fault(found: Split, known: Split) -> bool:
    """Whether the same optimizer goes wrong in the same way: a step too early, or the first window, by the same factor
    where it is one, or only a later window."""
    if found.optimizer != known.optimizer or found.equal or found.updates <= found.bound:
        return False
    if found.steps_too_early or known.steps_too_early:
        return found.steps_too_early and known.steps_too_early
    first = [s.windows[0].difference > s.bound for s in (found, known)]
    if not all(first):
        return not any(first)
    a, b = found.windows[0], known.windows[0]
    if b.cosine <= 1 - CLOSE:
        return a.difference > 1e3 * found.bound
    return a.cosine > 1 - CLOSE and abs(a.ratio - b.ratio) <= CLOSE * b.ratio


def _described(made: Accumulation, split: Split) -> str:
    k, size = split.accumulate, split.rows // split.accumulate
    if split.loop_splits or made.cut.split_batch or split.rows > SHOWN:
        return f"{split.rows} examples as [{', '.join([str(size)] * k)}]"
    order = made.cut.valid.order
    rows = " | ".join(str(list(order[i * size : (i + 1) * size])) for i in range(k))
    counts = _counts(made, split)
    if len(set(counts)) < 2:
        return f"rows {rows}"
    return f"rows {rows}; {(' against ' if k == 2 else ', ').join(map(str, counts))} valid targets"


def _counts(made: Accumulation, split: Split) -> Sequence[int]:
    """The valid targets of each micro-batch, where they weigh so in one batch."""
    if not made.cut.valid.counts:
        return ()
    try:
        return made.cut.valid.explaining(made.one_batch(split).weights) or ()
    except (CannotDecide, Unreliable):
        return ()
