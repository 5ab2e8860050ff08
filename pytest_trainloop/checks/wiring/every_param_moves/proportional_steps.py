"""Parameters that start at zero and stay there, since each step is as long as the parameter's own norm makes it.

LARS and LAMB scale the step of a tensor by the norm of its weights. From a start of size s such a step is proportional
to s, so that the relative change is the same for s = 1e-2 and s = 1e-5, while an ordinary step does not know s and a
projection or a proximal step comes back to zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.wiring.every_param_moves.causes import found
from pytest_trainloop.checks.wiring.every_param_moves.unmoved import by_torch
from pytest_trainloop.instruments.gradients.vectors import values
from pytest_trainloop.recording.shards import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

SIZES = (1e-2, 1e-5)
"""The two starts: they differ by a factor of 1000, and both are small compared with weights."""

AGREE = 2.0
"""Factor within which relative changes are one: gradients at both starts differ by what a start of 1e-2 changes. An
ordinary step makes them differ by the thousand."""

WHOLE = 0.9
"""Share of its start from which all steps together have taken it away."""


def held_at_zero(evidence: Evidence, unmoved: Sequence[Parameter]) -> Iterator[Finding]:
    """Those that start at zero and whose steps are a share of their own size."""
    record = evidence.run()
    zeros = [p.name for p in unmoved if p.start.zero and not by_torch(record, p)]
    if not zeros:
        return
    large, small = (_relative_changes(evidence.rerun(prepare=_started_at(zeros, size)), zeros) for size in SIZES)
    # a whole change is the way back to zero (odd: shift_held_at_zero_by_its_bound); none is no step at all
    shares = {n: small.get(n, 0.0) for n in zeros if 0.0 < large.get(n, 0.0) < WHOLE / record.rounds}
    names = [n for n, share in shares.items() if large[n] / AGREE < share < large[n] * AGREE]
    if names:
        facts = {"steps": record.rounds, "first": names[0], "share": shares[names[0]]}
        yield found("stays_at_zero", record.step_line(), names, **facts)


def _started_at(names: Sequence[str], size: float) -> Callable[[Watch], None]:
    def prepare(watch: Watch) -> None:
        random = torch.Generator().manual_seed(20_240)
        with torch.no_grad():
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                if entry.name in names:
                    own = local(tensor)
                    own.copy_(size * torch.randn(own.shape, generator=random).to(own))
        watch.table.take_as_start()

    return prepare


def _relative_changes(record: Record, names: Sequence[str]) -> dict[str, float]:
    """The norm of the change of each parameter by the norm of its start, for each step."""
    found = {}
    for p in record.parameters:
        if p.name in names and p.index in record.end and record.rounds:
            start, end = values(p.start, p.dtype), values(record.end[p.index], p.dtype)
            found[p.name] = float((end - start).norm() / start.norm().clamp_min(1e-30)) / record.rounds
    return found
