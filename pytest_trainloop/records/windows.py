"""Accumulation windows in a record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import BackwardOutcome, GradientLedger


def left_open(record: Record, ledger: GradientLedger) -> list[BackwardOutcome]:
    """The backward passes at the end of a run that no step consumed, where earlier ones of their line were consumed."""
    stepped = {b.backward.site for b in ledger.backwards if b.consumed}
    left = [b for b in ledger.backwards if _left_over(record, b) and b.backward.site in stepped]
    by_itself = record.raised is None and record.ended
    return left if left and by_itself and left[-1] is ledger.backwards[-1] else []


def _left_over(record: Record, outcome: BackwardOutcome) -> bool:
    """Whether nothing cleared these gradients, and no step came after the pass that could consume them: not even one
    that a gradient scaler skipped."""
    holders = {o for i in outcome.pending for o in record.held.get(i, ())}
    stepped = [(s.at, s.optimizer) for s in record.innermost_steps()]
    tried = [(c.at, c.optimizer) for c in record.scaler_calls() if c.what == "step"]
    later = any(optimizer in holders for at, optimizer in (*stepped, *tried) if at > outcome.backward.at)
    return bool(outcome.pending) and not outcome.consumed and not outcome.cleared and not later
