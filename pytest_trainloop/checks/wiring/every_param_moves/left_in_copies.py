"""Parameters whose updates go to a copy: the same loop moves them once they lie in memory in another layout.

``contiguous``, ``reshape`` and ``flatten`` give a view where the layout allows it, and a copy elsewhere. What is
written to the copy is lost. Both runs are in float64, so that no update is lost to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.memory_layout import turned
from pytest_trainloop.recording.shards import is_distributed
from pytest_trainloop.records.stepped_parameters import LEAST_STEPS, noise_of
from pytest_trainloop.runs.further_runs import float64_run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


def left_in_copies(evidence: Evidence, record: Record) -> list[Parameter]:
    """The parameters that never move, and move in another layout; also those that no optimizer holds."""
    suspected = {p.name: p for p in _suspects(record)}
    if not suspected or not evidence.repeatable:
        return []
    double = evidence.shared(float64_run)
    if double.raised is not None:
        return []
    resting = suspected.keys() - _moved(double)
    if not resting:
        return []
    plan = evidence.plan()
    other = evidence.rerun(replace(plan, double=True, may_raise=True, prepare=_turning(resting)))
    moved = _moved(other) if other.raised is None else set()
    return [p for name, p in suspected.items() if name in resting & moved]


def _suspects(record: Record) -> list[Parameter]:
    """Parameters that got gradients and never moved, and for which the layout may be the reason: not contiguous, or
    matrices that the loop's own code may read by columns."""
    noise, moved = noise_of(record), record.changed() | {i for move in record.moves for i in move.parameters}
    by_hand = not record.optimizers
    return [
        p
        for p in record.parameters
        if p.requires_grad and p.role != "foreign" and not p.gone and p.index in record.end and p.index not in moved
        if not record.declared_frozen(p.name)
        if not p.contiguous or (len(p.shape) > 1 and (by_hand or _of_own_class(record, p.index)))
        if sum(any(noise < a.incoming.peak for a in b.arrivals.get(p.index, ())) for b in record.backwards())
        >= LEAST_STEPS
    ]


def _of_own_class(record: Record, index: int) -> bool:
    """Whether an optimizer holds the parameter that is none of torch's."""
    return any(not record.optimizers[o].from_torch for o in record.held.get(index, ()))


def _moved(record: Record) -> set[str]:
    return set(record.names(record.changed() | {i for move in record.moves for i in move.parameters}))


def _turning(names: Collection[str]) -> Callable[[Watch], None]:
    """Gives the named parameters the same values in another layout before the run begins."""

    def prepare(watch: Watch) -> None:
        for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
            if entry.name in names and tensor.layout is torch.strided and not is_distributed(tensor):
                tensor.data = turned(tensor.data)
        watch.table.begin_anew()

    return prepare
