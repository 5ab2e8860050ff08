"""What drives which rate: schedulers and the optimizers that they move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import SchedulerStep
from pytest_trainloop.records.learning_rates import rates
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


def driven(evidence: Evidence) -> Iterator[Finding]:
    """Faults in what moves the rates."""
    record = evidence.run()
    yield from _drives_another(record)


def _drives_another(record: Record) -> Iterator[Finding]:
    """Schedulers that move the rates of an optimizer which was left behind when another one was built.

    Not those of a rate calculator, whose values are written to the groups that step, nor those of a wrapper's, which
    shares the dicts.
    """
    moved = {c.optimizer: c for c in reversed(record.of(SchedulerStep)) if c.before != c.after and c.until}
    for index, call in moved.items():
        if index is None or record.optimizers[index].steps:
            continue
        left = record.optimizers[index]
        for other in record.optimizers:
            shared = set(left.parameters) & set(other.parameters)
            groups = [r for r in rates(record) if r.optimizer == other.index]
            if not other.steps or not shared or set(left.dicts) & set(other.dicts):
                continue
            if len(groups[0].values) < 3 or not all(g.constant for g in groups):
                continue
            calls = [c for c in record.of(SchedulerStep) if c.number == call.number]
            yield Finding(
                cause="drives_another",
                summary=(
                    f"{call.scheduler} moves the rates of an optimizer that makes no step; the {other.kind} that steps "
                    f"stays at {some([f'{g.values[0]:g}' for g in groups])}"
                ),
                measured=(
                    f"{len(calls)} calls move its rate from {calls[0].before[0]:g} to {calls[-1].after[0]:g}; "
                    f"{other.steps} steps of the other optimizer, all at {groups[0].values[0]:g}"
                ),
                shown_by=f"both optimizers hold {some(record.names(shared))}",
                culprits=(f"{call.scheduler}.step()",),
                where=str(call.place),
            )
            break
