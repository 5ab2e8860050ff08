"""The smallest composition of rows over which windows of micro-batches still show the same fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.accumulation_equivalence.weights import CLOSE
from pytest_trainloop.compositions.composition import SHOWN
from pytest_trainloop.compositions.search import in_parts, smallest
from pytest_trainloop.errors import CannotDecide, Unreliable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.batches.valid_targets import ValidTargets
    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation
    from pytest_trainloop.checks.batch.accumulation_equivalence.left_out import Kind
    from pytest_trainloop.checks.batch.accumulation_equivalence.split import Split
    from pytest_trainloop.compositions.composition import Composition
    from pytest_trainloop.runs.evidence import Evidence


def fewest_rows(
    evidence: Evidence, made: Accumulation, split: Split, *, by_counts: bool = False, without: Kind | None = None
) -> tuple[Split, str]:
    """The smallest split that shows what this one does, and its micro-batches in words: ``rows [3] | [1], a smaller
    example with 7 and 2 valid targets``. ``by_counts``: what is wrong is how micro-batches with unequal counts weigh.
    ``without``: windows and one batch agree once this is left out."""
    if made.cut.whole:
        return split, _described(made, split)
    first = made.of_one_window() if _in_first_window(split) else made
    k, size = split.accumulate, len(split.composition.rows) // split.accumulate
    rows = _far_apart(split.composition.rows) if by_counts else _equal_counts(made.cut.valid, split.composition.rows)
    strategy = in_parts(rows, k, most=max(1, size - 1))

    def shows(composition: Composition) -> bool:
        smaller = first.compared(composition)
        return _same_fault(smaller, split) and (without is None or first.agrees_without(smaller, without) is not None)

    found = smallest(strategy, shows, evidence=evidence) if size > 1 else None
    if found is None:
        return split, _described(made, split)
    shown = first.compared(found)
    return shown, _described(first, shown)


def _far_apart(rows: Sequence[int]) -> tuple[int, ...]:
    """The rows with the fewest and the most valid targets in turn; they come in this order."""
    turns = (row for pair in zip(rows, reversed(rows), strict=True) for row in pair)
    return tuple(dict.fromkeys(turns))


def _equal_counts(valid: ValidTargets, rows: Sequence[int]) -> tuple[int, ...]:
    """The rows with a number of valid targets that most have, then all others."""
    counts = valid.counts[0] if valid.counts else [0] * (max(rows) + 1)
    seen = [counts[row] for row in rows]
    return tuple(sorted(rows, key=lambda row: (-seen.count(counts[row]), counts[row])))


def _in_first_window(split: Split) -> bool:
    return split.steps_too_early or split.windows[0].difference > split.bound


def _same_fault(found: Split, known: Split) -> bool:
    """Whether the same optimizer goes wrong in the same way: a step too early, or the first window, by the same factor
    where it is one, or only a later window."""
    if found.optimizer != known.optimizer or found.equal or found.updates <= found.bound:
        return False
    if found.steps_too_early or known.steps_too_early:
        return found.steps_too_early and known.steps_too_early
    first = [_in_first_window(s) for s in (found, known)]
    if not all(first):
        return not any(first)
    a, b = found.windows[0], known.windows[0]
    if b.cosine <= 1 - CLOSE:
        return a.difference > 1e3 * found.bound
    return a.cosine > 1 - CLOSE and abs(a.ratio - b.ratio) <= CLOSE * b.ratio


def _described(made: Accumulation, split: Split) -> str:
    composition, k = split.composition, split.accumulate
    if made.cut.whole:
        return f"the batch in {k} parts, as split_batch makes them"
    if split.loop_splits or made.cut.split_batch or len(composition.rows) > SHOWN:
        return f"{len(composition.rows)} rows as {list(composition.parts)}"
    counts = _counts(made, split)
    if len(set(counts)) < 2:
        return str(composition)
    told = (" and " if k == 2 else ", ").join(map(str, counts))
    return f"{composition}, a smaller example with {told} valid targets"


def _counts(made: Accumulation, split: Split) -> Sequence[int]:
    """The valid targets of each micro-batch, where they weigh so in one batch."""
    if not made.cut.valid.counts:
        return ()
    try:
        return made.counts(split) or ()
    except (CannotDecide, Unreliable):
        return ()
