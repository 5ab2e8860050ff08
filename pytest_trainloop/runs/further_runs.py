"""Further runs that several checks share, to be asked for by ``evidence.shared(...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.recording.watch import FULL_ROUNDS

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


def float64_run(evidence: Evidence) -> Record:
    """The watched run in float64."""
    return evidence.rerun(double=True, may_raise=True)


def longer_run(evidence: Evidence) -> Record:
    """A run of five times as many steps, most of them at light density: what moves seldom has moved in it."""
    return evidence.rerun(count=5 * evidence.plan().count, enough=lambda record: record.rounds >= 5 * FULL_ROUNDS)
