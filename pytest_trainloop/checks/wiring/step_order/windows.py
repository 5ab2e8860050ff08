"""Accumulation windows: micro-batches wiped inside one, and a window left open at the end of the data. Plain data, no
torch."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import GradWrite
from pytest_trainloop.records.windows import left_open

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import Account, Ledger

_CONSEQUENCES = ("accumulation_equivalence", "overfit_one_batch", "update_ratio", "every_param_moves")


def window_findings(record: Record, ledger: Ledger, accumulate: int = 0) -> Iterator[Finding]:
    """What goes wrong inside an accumulation window.

    Passes count as micro-batches where the loop's own knob says how many there are (``accumulate``), or where each has
    a batch of its own: several passes over one batch are what adversarial training and per-sample gradients do.
    """
    by_hand = ledger.by_hand or any(w.how == "altered" and "add" in w.by for w in record.of(GradWrite))
    by_site: dict[object, list[Account]] = defaultdict(list)
    for account in ledger.accounts:
        if account.backward.reached:
            by_site[account.backward.site].append(account)
    for accounts in by_site.values():
        lost = [a for a in accounts if a.wiped and not a.consumed and not a.pending]
        perturbed = any(record.moved_between(a.backward, a.wiped) for a in lost)
        window = _window(accounts) if 0 < len(lost) < len(accounts) else None
        fresh = all(a.backward.item < b.backward.item for a, b in itertools.pairwise(accounts))
        micro = fresh or (window is not None and window[1] == accumulate)
        if window and micro and not perturbed and not by_hand and all(_finite(a) for a in lost):
            yield _zeroed_inside(record, accounts, lost, *window)
            return


def left_over(record: Record, ledger: Ledger) -> Iterator[Finding]:
    """A window that is open when the data end, of a loop without a knob for it."""
    left = left_open(record, ledger)
    if left:
        yield Finding(
            cause="window_left_over",
            level="advice",
            summary=(
                f"the last {len(left)} backward passes were never stepped: the window at the end of the data stays open"
            ),
            measured=f"{len(left)} of {len(ledger.accounts)} backward passes at the end; {record.items} batches",
            shown_by="their gradients still stand in .grad when fit returns",
            culprits=("optimizer.step()",),
            where=str(left[0].backward.place),
            repair=(
                "step once more after the loop when a window is open, or drop the remainder on purpose (drop_last=True)"
            ),
        )


def _window(accounts: list[Account]) -> tuple[int, int] | None:
    """How many passes are wiped in a window, and how many make one, where at least three whole windows are alike."""
    runs = [(bool(c), len(list(g))) for c, g in itertools.groupby(accounts, key=lambda a: bool(a.consumed))]
    wiped = [n for consumed, n in (runs if runs[-1][0] else runs[:-1]) if not consumed]
    kept = [n for consumed, n in runs if consumed]
    if len(wiped) < 3 or len(set(wiped)) != 1:
        return None
    return wiped[0], wiped[0] + max(set(kept), key=kept.count)


def _finite(account: Account) -> bool:
    return all(a.incoming.finite for arrived in account.backward.arrivals.values() for a in arrived)


def _zeroed_inside(record: Record, accounts: list[Account], lost: list[Account], wiped: int, window: int) -> Finding:
    wipe = record.wipe_after(lost[0].backward, lost[0].wiped)
    return Finding(
        cause="zeroed_inside_window",
        summary=f"gradients are zeroed inside the accumulation window: {wiped} of {window} micro-batches are lost",
        measured=f"{len(lost)} of {len(accounts)} backward passes were wiped before a step could consume them",
        shown_by=f"in every window the gradients of {wiped} micro-batches are gone when the step reads what is left",
        culprits=(wipe.by if wipe else "zero_grad()",),
        where=str(wipe.place if wipe else lost[0].backward.place),
        repair="call zero_grad() once for each step, right after it, not once for each micro-batch",
        explains=_CONSEQUENCES,
    )
