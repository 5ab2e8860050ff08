"""Runs from another start and at a far higher learning rate, in which every weight moves that can.

A weight that stays at the bound of a projection moves from another start. One whose steps are rounded away, or kept
elsewhere until they are large enough, moves at a higher learning rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.gradients.dependence import mover
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.optimizer_options import lr_times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

RAISED = 1e4
"""Factor on the learning rates: more than the 256 steps of half a ULP that rounding to bfloat16 can take back."""

LONGER = 13
"""Times as many steps as are watched in full, from another start."""


def displaced(names: Sequence[str]) -> Callable[[Watch], None]:
    """Moves the named parameters by half their root mean square before the run begins."""
    move = mover(names, jitter=False)

    def prepare(watch: Watch) -> None:
        move(watch)
        watch.table.begin_anew()

    return prepare


def displaced_run(evidence: Evidence, names: Sequence[str]) -> Record:
    """A run of thirteen times as many steps in which these parameters start elsewhere."""
    count = LONGER * evidence.plan().count
    return evidence.rerun(prepare=displaced(names), enough=lambda r: r.rounds >= LONGER * FULL_ROUNDS, count=count)


def displaced_run_at_high_lr(evidence: Evidence, names: Sequence[str]) -> Record:
    """A run of five times as many steps in which they start elsewhere, at a far higher learning rate."""
    enough, count = (lambda r: r.rounds >= 5 * FULL_ROUNDS), 5 * evidence.plan().count
    return evidence.rerun(
        prepare=displaced(names),
        contexts=lr_times(RAISED),
        enough=enough,
        count=count,
        varied="with a higher learning rate",
    )
