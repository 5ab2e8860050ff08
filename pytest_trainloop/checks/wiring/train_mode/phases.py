"""The runs in which training and evaluation are looked for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_trainloop.tracing.dropout_in_evaluation import DropoutInEvaluation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan
    from pytest_trainloop.tracing.dropout_in_evaluation import ActiveDropout

EPOCH = 3
"""Steps of an epoch in a run that is to have several."""


class ShortEpochs(NamedTuple):
    """A run over so few batches that its epochs, and what follows them, are watched as well."""

    record: Record
    plan: RunPlan
    dropout: DropoutInEvaluation
    """The dropout that acted in evaluation mode."""


def phases(evidence: Evidence) -> Iterator[tuple[Record, RunPlan]]:
    """The watched run, and one with short epochs."""
    record = evidence.run()
    yield record, evidence.plan()
    if record.rounds and any(f.in_training or f.in_eval for f in record.root_forwards()):
        short = evidence.shared(short_epochs)
        yield short.record, short.plan


def short_epochs(evidence: Evidence) -> ShortEpochs:
    record = evidence.run()
    count = EPOCH * max(1, round(record.items / record.rounds))
    plan = replace(evidence.plan(), count=count, enough=lambda r: r.rounds >= 2 * EPOCH)
    dropout = DropoutInEvaluation()
    return ShortEpochs(evidence.rerun(plan, contexts=dropout.contexts), plan, dropout)


def dropout_in_evaluation(evidence: Evidence) -> list[ActiveDropout]:
    """Dropout that acts in evaluations inside ``fit``."""
    if not evidence.repeatable:
        return evidence.shared(DropoutInEvaluation.of).found
    record = evidence.run()
    if not record.drops or not record.rounds:
        return []
    short = evidence.shared(short_epochs)
    if not _evaluates(short.record) and _evaluates(record):
        return evidence.shared(DropoutInEvaluation.of).found
    return short.dropout.found


def _evaluates(record: Record) -> bool:
    return any(not f.training and not f.answered for f in record.root_forwards())
