"""Whether the loss changes when all rows of the batch change places together.

See docs/how-it-decides.md#rows-that-meet-outside-of-the-model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop import nested
from pytest_trainloop.batches.other_values import OtherOrder, has_rows
from pytest_trainloop.checks.batch.batch_independence.meetings import meeting
from pytest_trainloop.checks.batch.batch_independence.shares import AS_IT_IS, RowShares

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.row_tape import TapedCall


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """Two orders of the same rows, and what was backpropagated of each."""

    order: tuple[int, ...]
    before: float
    after: float
    call: TapedCall | None = None
    """Where rows meet, where that is known."""

    @property
    def change(self) -> float:
        """The difference over the larger of both."""
        return abs(self.after - self.before) / max(abs(self.before), abs(self.after))


def order_of_rows(evidence: Evidence) -> OrderedRows | None:
    """Two neighbours whose exchange changes the loss, or else a shuffle that does; None where neither does, or where it
    cannot be told.

    Draws are the same for each row. Not comparable are batches with a tensor that has no entry for each row (graphs,
    packed sequences), and steps that compute in a low precision.
    """
    shares = evidence.shared(RowShares.of)
    if shares is None or not _one_entry_each(shares):
        return None
    met = evidence.shared(meeting)
    base = shares.tape(AS_IT_IS, shared_draws=True)
    rows = range(shares.rows)
    shuffled = (*(row for row in rows if row % 2), *(row for row in rows if not row % 2))
    for order in ((1, 0, *rows[2:]), shuffled):
        other = shares.tape(OtherOrder(order), shared_draws=True)
        if base is None or not base.double or other is None or not base.comparable(other):
            return None
        bound = shares.bound(base, other)
        for before, after in zip(base.values, other.values, strict=True):
            if abs(before - after) > bound * max(abs(before), abs(after), 1.0):  # NaN differs from nothing
                return OrderedRows(order, before, after, met.call if met is not None else None)
    return None


def _one_entry_each(shares: RowShares) -> bool:
    few = shares.few
    return few is not None and all(
        tensor.dim() == 0 or has_rows(tensor, few.rows, few.axis) for tensor in nested.tensors(few.batch)
    )
