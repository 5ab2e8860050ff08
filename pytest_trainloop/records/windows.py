"""Accumulation windows in a record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import Account, Ledger


def left_open(record: Record, ledger: Ledger) -> list[Account]:
    """The passes at the end of a run that no step consumed, where earlier ones of their place were consumed."""
    stepped = {a.backward.site for a in ledger.accounts if a.consumed}
    left = [a for a in ledger.accounts if _left_over(record, a) and a.backward.site in stepped]
    by_itself = record.raised is None and record.ended
    return left if left and by_itself and left[-1] is ledger.accounts[-1] else []


def _left_over(record: Record, account: Account) -> bool:
    """Whether no step came after this pass that could consume its gradients, not even one that a gradient scaler
    skipped, and nothing wiped them."""
    holders = {o for i in account.pending for o in record.held.get(i, ())}
    stepped = [(s.at, s.optimizer) for s in record.innermost_steps()]
    tried = [(c.at, c.optimizer) for c in record.scaler_calls() if c.what == "step"]
    later = any(optimizer in holders for at, optimizer in (*stepped, *tried) if at > account.backward.at)
    return bool(account.pending) and not account.consumed and not account.wiped and not later
