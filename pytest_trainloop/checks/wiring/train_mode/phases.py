"""The runs in which training and evaluation are looked for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

EPOCH = 3
"""Steps of an epoch in a run that is to have several."""


def phases(evidence: Evidence) -> Iterator[tuple[Record, RunPlan]]:
    """The watched run, and one over so few batches that its epochs and what follows them are watched as well."""
    record = evidence.run()
    yield record, evidence.plan()
    if record.rounds and any(f.in_training or f.in_eval for f in record.root_forwards()):
        yield evidence.shared(_short_epochs)


def _short_epochs(evidence: Evidence) -> tuple[Record, RunPlan]:
    record = evidence.run()
    count = EPOCH * max(1, round(record.items / record.rounds))
    plan = replace(evidence.plan(), count=count, enough=lambda r: r.rounds >= 2 * EPOCH)
    return evidence.rerun(plan), plan
