"""Parameters whose updates go to a copy: the same loop moves them once they lie in memory in another layout.

``contiguous``, ``reshape`` and ``flatten`` give a view where the layout allows it, and a copy elsewhere. What is
written to the copy is lost. Both runs are in float64, so that no update is lost to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.wiring.every_param_moves.causes import found
from pytest_trainloop.memory_layout import turned
from pytest_trainloop.recording.shards import is_distributed
from pytest_trainloop.records.stepped_parameters import LEAST_STEPS, noise_of
from pytest_trainloop.runs.further_runs import float64_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


def left_in_copies(evidence: Evidence) -> Iterator[Finding]:
    """The parameters that never move, and move in another layout; also those that no optimizer holds."""
    record = evidence.run()
    suspected = {p.name: p for p in _suspects(record)}
    if not suspected or not evidence.repeatable:
        return
    double = evidence.shared(float64_run)
    resting = suspected.keys() - _moved(double) if double.raised is None else set()
    if not resting:
        return

    def turn(watch: Watch) -> None:
        for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
            if entry.name in resting and tensor.layout is torch.strided and not is_distributed(tensor):
                tensor.data = turned(tensor.data)
        watch.table.begin_anew()

    other = evidence.rerun(replace(evidence.plan(), double=True, may_raise=True, prepare=turn))
    moved = resting & _moved(other) if other.raised is None else set()
    if copied := [p for name, p in suspected.items() if name in moved]:
        first, at = copied[0], record.step_line() or next(iter(record.backwards()), "")
        passes = sum(any(not a.incoming.zero for a in b.arrivals.get(first.index, ())) for b in record.backwards())
        facts = {"passes": passes, "first": first.name, "shape": str(first.shape), "contiguous": first.contiguous}
        yield found("written_to_a_copy", at, [p.name for p in copied], **facts)


def _suspects(record: Record) -> Iterator[Parameter]:
    """Parameters that got gradients and never moved, and for which the layout may be the reason: not contiguous, or
    matrices that the loop's own code may read by columns."""
    noise, moved = noise_of(record), record.changed() | {i for move in record.moves for i in move.parameters}
    for p in record.parameters:
        if not p.requires_grad or p.role == "foreign" or p.gone or p.index not in record.end or p.index in moved:
            continue
        holders = [record.optimizers[o] for o in record.held.get(p.index, ())]
        own_code = not record.optimizers or any(not o.from_torch for o in holders)
        if record.declared_frozen(p.name) or (p.contiguous and not (len(p.shape) > 1 and own_code)):
            continue
        passes = sum(any(noise < a.incoming.peak for a in b.arrivals.get(p.index, ())) for b in record.backwards())
        if passes >= LEAST_STEPS:
            yield p


def _moved(record: Record) -> set[str]:
    return set(record.names(record.changed() | {i for move in record.moves for i in move.parameters}))
