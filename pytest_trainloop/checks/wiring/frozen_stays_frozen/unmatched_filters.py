"""Filters by name that are to freeze parameters, and match none of the model's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.frozen_stays_frozen.causes import found
from pytest_trainloop.tracing.handed_names import HandedNames
from pytest_trainloop.tracing.unmatched_names import unmatched_names
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


def unmatched_filters(evidence: Evidence) -> Iterator[Finding]:
    """Patterns that freeze parameters which train, once they are answered yes for them."""
    record = evidence.shared(HandedNames.of).record
    trained = [p.name for p in record.parameters if p.trainable and p.role == "model" and p.declared] if record else []
    if record is None or any(map(record.declared_frozen, trained)):
        return  # still_trainable
    for one in unmatched_names(evidence, trained, _frozen):
        facts = {"patterns": some(one.patterns), "asked": one.asked}
        if one.nearly:
            yield found("freeze_matches_nothing", one.place, one.nearly, level="advice", repair=one.repair, **facts)
        else:
            yield found("freeze_matches_nothing", one.place, one.starts, "alone", level="advice", **facts)


def _frozen(record: Record, names: Sequence[str]) -> bool:
    return not {p.name for p in record.parameters if p.trainable}.intersection(names)
