"""Whether the last window of a loop with the knob accumulate is stepped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.records.windows import left_open

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import GradientLedger


def last_window_lost(record: Record, ledger: GradientLedger, accumulate: int) -> Iterator[Finding]:
    """The last window, where it is left open by a loop whose knob was at ``accumulate``."""
    left = left_open(record, ledger)
    if left:
        yield Finding(
            cause="last_window_lost",
            level="advice",
            summary=f"the last {len(left)} of {record.items} micro-batches are never stepped: the window stays open",
            measured=f"{len(left)} backward passes after the last step, windows of {accumulate}",
            shown_by="their gradients still stand in .grad when fit returns",
            culprits=("optimizer.step()",),
            where=str(left[0].backward.place),
            repair="step once more after the loop when a window is open, or drop the remainder on purpose",
        )
