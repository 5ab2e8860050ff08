"""The first operation, forward or backward, whose error is larger than rounding explains, and what happened there."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from pytest_trainloop.checks.numerics.precision_parity.expected_error import unit_roundoff
from pytest_trainloop.checks.numerics.precision_parity.first_gradient import (
    distance,
    finite,
    first_gradient,
    first_scale,
)
from pytest_trainloop.checks.numerics.precision_parity.float32_regions import InFloat32, ScaledLoss
from pytest_trainloop.checks.numerics.precision_parity.op_log import Operation, OpLog, Sample
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.torch_names import ADDITIONS, SUBTRACTIONS
from pytest_trainloop.whose import present

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.numerics.precision_parity.runs import LowPrecisionRuns, Parity
    from pytest_trainloop.recording.events import Place

Kind = Literal["overflow", "underflow", "cancellation", "accumulation", "custom_backward", "precision_lost"]

FAR = 10.0
"""Times the explained error from which one tensor is wrong: single tensors reach 3.5 on right loops
(docs/how-it-decides.md#expected-rounding-error)."""

CANCELS = 0.25
"""Size of a difference, relative to its operands, below which digits are lost: two bits and more."""

REPEATED = 16
"""Additions on one line from which they count as one sum."""

_DIFFERENCES = SUBTRACTIONS | {"sub_", "__isub__", "add", "__add__", "diff"}
_SUMS = (ADDITIONS - {"radd"}) | {"add_", "__iadd__", "iadd", "sum", "cumsum", "mean", "index_add_"}


@dataclass(frozen=True, slots=True)
class Located:
    """Where the gradient, or a value on the way to it, goes wrong."""

    kind: Kind
    direction: Literal["forward", "backward"] = "forward"
    operation: Operation | None = None
    low: Sample | None = None
    """Its result (in backward: the gradient that it gives) in low precision."""
    reference: Sample | None = None
    """The same in float64."""
    shown_by: str = ""
    share: float = 0.0
    """Of the gradient's entries, those that are zero only in low precision."""
    names: tuple[str, ...] = ()
    """Parameters, where no operation is known."""
    left: float = math.inf
    """The error of the gradient with the operation's region in float32."""


class Aligned(NamedTuple):
    """One operation in low precision, in float64, and in float64 with rounding."""

    low: Operation
    reference: Operation
    rounded: list[Operation]


def locate(runs: LowPrecisionRuns, parity: Parity) -> Located:
    """Run the loop again with a log of its operations, in low precision, in float64 and with rounding."""
    scale = _helping_scale(runs, parity)
    try:
        aligned = _aligned(runs)
    except CannotDecide:  # one of these runs cannot be made
        aligned = []
    unit = unit_roundoff(parity.dtype)
    found = _forward(aligned, unit)
    if found is None and scale is not None:
        return _underflow(runs, aligned, scale)
    found = found or _backward(aligned, unit)
    if found is None:
        return Located("precision_lost", names=tuple(first_gradient(runs.record)))
    return _in_float32(runs, parity, found)


def _aligned(runs: LowPrecisionRuns) -> list[Aligned]:
    """The operations that all runs have, in the order of the low one: the same line's nth call of a function."""
    low, reference, rounded = OpLog(), OpLog(), [OpLog(), OpLog()]
    low.unscale(first_scale(runs.again(low.contexts)))
    runs.reference_inside(reference.contexts)
    for noise, log in zip((None, 1), rounded, strict=True):
        runs.rounded(noise, contexts=log.contexts)
    others = [_numbered(log.operations) for log in (reference, *rounded)]
    found = []
    for key, operation in _numbered(low.operations).items():
        if all(key in other for other in others):
            same, *more = (other[key] for other in others)
            found.append(Aligned(operation, same, more))
    return found


def _numbered(operations: Sequence[Operation]) -> dict[tuple[str, Place, int], Operation]:
    count: Counter[tuple[str, Place]] = Counter()
    numbered = {}
    for operation in operations:
        name, place = operation.name, operation.place
        count[name, place] += 1
        numbered[name, place, count[name, place]] = operation
    return numbered


def _wrong(low: Sample, reference: Sample, rounded: Sequence[Sample], unit: float) -> bool:
    explained = max(unit, *(r.distance(reference) for r in rounded))
    return low.distance(reference) > FAR * explained


def wrong_operations(runs: LowPrecisionRuns, parity: Parity) -> list[Located]:
    """Every operation of the forward pass that is wrong, and the one that is first wrong in backward."""
    aligned, unit, found = _aligned(runs), unit_roundoff(parity.dtype), list[Located]()
    for number, (low, reference, rounded) in enumerate(aligned):
        if _wrong(low.output, reference.output, [r.output for r in rounded], unit):
            kind = _kind(low, reference, aligned[:number])
            found.append(Located(kind, "forward", low, low.output, reference.output))
    backward = _backward(aligned, unit)
    return found if backward is None else [*found, backward]


def _forward(aligned: Sequence[Aligned], unit: float) -> Located | None:
    for number, (low, reference, rounded) in enumerate(aligned):
        if _wrong(low.output, reference.output, [r.output for r in rounded], unit):
            kind = _kind(low, reference, aligned[:number])
            return Located(kind, "forward", low, low.output, reference.output)
    return None


def _backward(aligned: Sequence[Aligned], unit: float) -> Located | None:
    """The operation that gets the right gradient at its output and gives a wrong one to its input."""
    wrong: dict[int, tuple[Sample, Sample]] = {}
    for number, (low, reference, rounded) in enumerate(aligned):
        gradients = [r.gradient for r in rounded]
        known = [g for g in gradients if g is not None]
        if low.gradient is None or reference.gradient is None or len(known) < len(gradients):
            continue
        if _wrong(low.gradient, reference.gradient, known, unit):
            wrong[number] = (low.gradient, reference.gradient)
    if not wrong:
        return None
    number = max(wrong)
    source = aligned[number].low
    consumers = [
        a for n, a in enumerate(aligned) if source.number in a.low.made_by and n not in wrong and a.low.gradient
    ]
    consumer = next((a for a in consumers if a.low.custom), consumers[0] if consumers else None)
    operation = source if consumer is None else consumer.low
    return Located(_kind_in_backward(consumer, *wrong[number]), "backward", operation, *wrong[number])


def _kind_in_backward(consumer: Aligned | None, low: Sample, reference: Sample) -> Kind:
    """What happened in the backward pass of an operation whose own gradient was right."""
    if consumer is not None and consumer.low.custom:
        return "custom_backward"
    if consumer is not None and low.lost and _inputs_vanished(consumer.low, consumer.reference):
        return "underflow"
    if low.lost:
        return "overflow"
    return "underflow" if low.zeros > reference.zeros else "precision_lost"


def _inputs_vanished(low: Operation, reference: Operation) -> bool:
    """Whether some inputs of an operation are zero in low precision alone."""
    return any(i.zeros > j.zeros for i, j in zip(low.inputs, reference.inputs, strict=False))


def _kind(low: Operation, reference: Operation, before: Sequence[Aligned]) -> Kind:
    """What happened in an operation whose inputs were right and whose output is not."""
    largest = torch.finfo(low.output.dtype).max
    if low.output.lost:
        return "underflow" if _inputs_vanished(low, reference) and reference.output.peak <= largest else "overflow"
    size = max((i.peak for i in reference.inputs), default=0.0)
    if low.name in _SUMS and sum((a.low.place, a.low.name) == (low.place, low.name) for a in before) >= REPEATED:
        return "accumulation"
    if low.name in _DIFFERENCES and reference.output.peak < CANCELS * size:
        return "cancellation"
    if low.output.zeros > reference.output.zeros and reference.output.peak < torch.finfo(low.output.dtype).tiny:
        return "underflow"
    if low.name in _SUMS and low.output.dtype in (torch.bfloat16, torch.float16):
        return "accumulation"
    return "precision_lost"


def _helping_scale(runs: LowPrecisionRuns, parity: Parity) -> float | None:
    """A factor on the loss with which the gradient is right: it was too small for float16."""
    if parity.dtype is not torch.float16 or not parity.finite:
        return None
    expected = first_gradient(runs.reference)
    peak = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    if not 0.0 < peak < 1.0:
        return None
    scale = 2.0 ** min(24, math.floor(math.log2(64.0 / peak)))
    record = runs.again(lambda watch: (ScaledLoss(scale),))
    gradient = {n: g / scale for n, g in first_gradient(record, runs.reference).items()}
    return scale if finite(gradient) and distance(expected, gradient) <= parity.measured / 2 else None


def _underflow(runs: LowPrecisionRuns, aligned: Sequence[Aligned], scale: float) -> Located:
    expected, gradient = first_gradient(runs.reference), first_gradient(runs.record, runs.reference)
    entries = sum(g.numel() for g in expected.values())
    both = {n: (gradient[n], g) for n, g in expected.items() if n in gradient and len(gradient[n]) == len(g)}
    lost = {n: int(((low == 0) & (g != 0)).sum()) for n, (low, g) in both.items()}
    last = next((a for a in reversed(aligned) if a.low.gradient and a.reference.gradient), None)
    return Located(
        "underflow",
        "backward",
        None,
        last.low.gradient if last else None,
        last.reference.gradient if last else None,
        f"with the loss multiplied by {scale:g} before backward, and the gradient divided by it, they agree",
        share=sum(lost.values()) / max(1, entries),
        names=tuple(n for n, count in lost.items() if count) or tuple(expected),
    )


def _in_float32(runs: LowPrecisionRuns, parity: Parity, found: Located) -> Located:
    """The same, with the error that is left when the region of the operation is computed in float32."""
    operation = present(found.operation, "the operation")
    region = InFloat32(operation)
    record = runs.again(region.contexts)
    if record.raised is not None or not region.met:
        return found
    measured = distance(first_gradient(runs.reference), first_gradient(record, runs.reference))
    if not measured < max(2.0 * parity.explained, parity.measured / 4):
        return found
    where = f"module {operation.module!r}" if operation.module else "this line"
    before = f"{parity.measured:.2g}" if math.isfinite(parity.measured) else "infinitely far"
    shown = f"with {where} in float32 the gradient is {measured:.2g} from float64, not {before}"
    return replace(found, shown_by=shown, left=measured)
