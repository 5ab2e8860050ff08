"""Float32 masters that hold other values than the low-precision weights that the first gradient is taken at.

The step moves the masters, and its result is written over the weights: whatever these held before (a checkpoint that
was loaded after the masters were made) is gone after the first step. Rounding sets the two less than one ULP apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.gradients.vectors import values
from pytest_trainloop.optimizers.spacing import spacings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

LOW = ("bfloat16", "float16")

HALF = 0.5
"""Share of a tensor's entries that are more than one ULP apart."""


@dataclass(frozen=True, slots=True)
class OtherMasters:
    """``names`` are low-precision weights whose masters began elsewhere."""

    names: tuple[str, ...]
    of: int
    """Weights that have a master."""
    dtype: str
    apart: float
    """The largest distance of an entry to that of its master before the first step."""
    ulp: float
    """One ULP there."""
    where: str


def other_masters(evidence: Evidence) -> OtherMasters | None:
    record = evidence.run()
    copies = [p for p in record.parameters if _is_copy(record, p)]
    if not copies or not any(_apart(p, m) is not None for p in copies for m in _masters(record, p)):
        return None
    first = evidence.rerun(enough=lambda r: r.rounds >= 1, may_raise=True)
    if first.raised is not None or first.rounds != 1:
        return None
    pairs = [(p, next(_written_from(first, p), None)) for p in (first.parameters[c.index] for c in copies)]
    masters = [m.index for _, m in pairs if m is not None]
    if len(masters) < len(pairs) or len(set(masters)) < len(masters):
        return None  # these weights are not written from one master each
    found = {p.name: gap for p, m in pairs if m is not None and (gap := _apart(p, m)) is not None}
    if not found:
        return None
    apart, ulp = max(found.values())
    return OtherMasters(tuple(found), len(pairs), copies[0].dtype, apart, ulp, first.step_line())


def _is_copy(record: Record, p: Parameter) -> bool:
    """A low-precision weight that gradients arrive at, that no optimizer holds, and that is first written after the
    first step."""
    first = next((s.at for s in record.innermost_steps()), 0)
    moved = [m for m in record.moves if m.by is None and p.index in m.parameters]
    early = any(m.at < first for m in moved)
    return p.dtype in LOW and p.index not in record.held and bool(moved) and not early and any(record.arrivals(p.index))


def _masters(record: Record, p: Parameter) -> Iterator[Parameter]:
    """Tensors of no module that have its shape, and that an optimizer alone moves."""
    moved = record.moved_outside_steps()
    for q in record.parameters:
        outside = q.role == "foreign" and q.index in record.held and q.index not in moved
        if outside and q.dtype == "float32" and q.shape == p.shape and record.reached(q.index):
            yield q


def _written_from(first: Record, p: Parameter) -> Iterator[Parameter]:
    """The masters that a weight holds the rounded values of after the first step."""
    dtype = getattr(torch, p.dtype)
    for q in _masters(first, p):
        weight, master = values(first.end[p.index], p.dtype), values(first.end[q.index], q.dtype)
        if len(weight) == len(master) and torch.equal(weight, master.to(dtype).to(weight.dtype)):
            yield q


def _apart(p: Parameter, master: Parameter) -> tuple[float, float] | None:
    """The largest distance before the first step and one ULP there, where rounding does not make it."""
    weight, wide = values(p.start, p.dtype).double(), values(master.start, master.dtype).double()
    if len(weight) != len(wide) or not len(weight):
        return None
    gap, ulp = (weight - wide).abs(), spacings(torch.maximum(weight.abs(), wide.abs()), p.dtype)
    if float((gap > ulp).double().mean()) < HALF:
        return None
    worst = int(gap.argmax())
    return float(gap[worst]), float(ulp[worst])
