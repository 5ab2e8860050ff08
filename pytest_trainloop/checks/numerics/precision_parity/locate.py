"""The first operation, forward or backward, that leaves the float64 run by more than rounding explains, and what
happened there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from pytest_trainloop.checks.numerics.precision_parity.expected_error import unit_roundoff
from pytest_trainloop.checks.numerics.precision_parity.first_gradient import (
    distance,
    finite,
    first_gradient,
    first_scale,
)
from pytest_trainloop.checks.numerics.precision_parity.float32_regions import InFloat32, Scaled
from pytest_trainloop.checks.numerics.precision_parity.op_log import Call, Journal, Sample
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.torch_names import ADDITIONS, SUBTRACTIONS

if TYPE_CHECKING:
    from pytest_trainloop.checks.numerics.precision_parity.runs import Parity, Way
    from pytest_trainloop.recording.events import Place

Kind = Literal["overflow", "underflow", "cancellation", "accumulation", "custom_backward", "precision_lost"]

FAR = 10.0
"""Times the explained error from which one tensor is out: single tensors reach 3.5 on right loops
(docs/how-it-decides.md#expected-rounding-error)."""

CANCELS = 0.25
"""Size of a difference, over what it is taken of, below which digits are lost: two bits and more."""

REPEATED = 16
"""Additions on one line before it counts as a sum by hand."""

_DIFFERENCES = SUBTRACTIONS | {"sub_", "__isub__", "add", "__add__", "diff"}
_SUMS = (ADDITIONS - {"radd"}) | {"add_", "__iadd__", "iadd", "sum", "cumsum", "mean", "index_add_"}


@dataclass(frozen=True, slots=True)
class Located:
    """``call`` is the operation, ``direction`` of the pass; ``low`` and ``reference`` are what it gave (in backward:
    what came out of it) in low precision and in float64. ``share`` is the part of the gradient's entries that are zero
    only in low precision."""

    kind: Kind
    direction: Literal["forward", "backward"]
    call: Call | None
    low: Sample | None
    reference: Sample | None
    shown_by: str
    share: float = 0.0
    names: tuple[str, ...] = ()


def locate(way: Way, parity: Parity) -> Located:
    """Run the loop again with a journal of its operations, in low precision, in float64 and with rounding."""
    scale = _helping_scale(way, parity)
    calls = _calls(way)
    unit = unit_roundoff(parity.dtype)
    found = _forward(calls, unit)
    if found is None and scale is not None:
        return _too_small(way, calls, scale)
    found = found or _backward(calls, unit)
    if found is None:
        return Located("precision_lost", "forward", None, None, None, "", names=tuple(first_gradient(way.record)))
    return _proved(way, parity, found)


Aligned = tuple[Call, Call, Sequence[Call]]
"""One call in low precision, in float64, and in float64 with rounding."""


def _calls(way: Way) -> list[Aligned]:
    """None where the loop cannot be looked at so closely."""
    try:
        return _aligned(*_journals(way))
    except CannotDecide:
        return []


def _journals(way: Way) -> tuple[Journal, Journal, list[Journal]]:
    low, reference, rounded = Journal(), Journal(), [Journal(), Journal()]
    low.unscale(first_scale(way.again(low.contexts)))
    way.reference_inside(reference.contexts)
    for noise, journal in zip((None, 1), rounded, strict=True):
        way.rounded(noise, contexts=journal.contexts)
    return low, reference, rounded


def _aligned(low: Journal, reference: Journal, rounded: Sequence[Journal]) -> list[Aligned]:
    """The calls that all journals have, in the order of the low one: the same line's nth call of an operation."""
    others = [_numbered(j.calls) for j in (reference, *rounded)]
    found: list[Aligned] = []
    for key, call in _numbered(low.calls).items():
        if all(key in other for other in others):
            same, *more = (other[key] for other in others)
            found.append((call, same, more))
    return found


def _numbered(calls: Sequence[Call]) -> dict[tuple[str, Place, int], Call]:
    count: Counter[tuple[str, Place]] = Counter()
    numbered = {}
    for call in calls:
        count[call.name, call.place] += 1
        numbered[call.name, call.place, count[call.name, call.place]] = call
    return numbered


def _out(low: Sample, reference: Sample, rounded: Sequence[Sample], unit: float) -> bool:
    explained = max(unit, *(r.distance(reference) for r in rounded))
    return low.distance(reference) > FAR * explained


def _forward(calls: Sequence[Aligned], unit: float) -> Located | None:
    for number, (low, reference, rounded) in enumerate(calls):
        if _out(low.output, reference.output, [r.output for r in rounded], unit):
            kind = _kind(low, reference, calls[:number])
            return Located(kind, "forward", low, low.output, reference.output, "")
    return None


def _backward(calls: Sequence[Aligned], unit: float) -> Located | None:
    """The operation whose own gradient came in right and went out wrong."""
    out: dict[int, tuple[Sample, Sample]] = {}
    for number, (low, reference, rounded) in enumerate(calls):
        gradients = [r.gradient for r in rounded]
        known = [g for g in gradients if g is not None]
        if low.gradient is None or reference.gradient is None or len(known) < len(gradients):
            continue
        if _out(low.gradient, reference.gradient, known, unit):
            out[number] = (low.gradient, reference.gradient)
    if not out:
        return None
    number = max(out)
    source = calls[number][0].number
    takers = [c for n, c in enumerate(calls) if source in c[0].given and n not in out and c[0].gradient]
    taker = next((c for c in takers if c[0].own), takers[0] if takers else None)
    return Located(_kind_behind(taker, *out[number]), "backward", (taker or calls[number])[0], *out[number], "")


def _kind_behind(taker: Aligned | None, low: Sample, reference: Sample) -> Kind:
    """What happened in the backward pass of an operation whose own gradient was right."""
    if taker is not None and taker[0].own:
        return "custom_backward"
    if taker is not None and low.lost and _vanished(taker[0], taker[1]):
        return "underflow"
    if low.lost:
        return "overflow"
    return "underflow" if low.zeros > reference.zeros else "precision_lost"


def _vanished(low: Call, reference: Call) -> bool:
    """Whether some of what an operation was given is zero in low precision alone."""
    return any(i.zeros > j.zeros for i, j in zip(low.inputs, reference.inputs, strict=False))


def _kind(low: Call, reference: Call, before: Sequence[Aligned]) -> Kind:
    """What happened in an operation whose inputs were right and whose output is not."""
    largest = torch.finfo(low.output.dtype).max
    if low.output.lost:
        return "underflow" if _vanished(low, reference) and reference.output.peak <= largest else "overflow"
    size = max((i.peak for i in reference.inputs), default=0.0)
    if low.name in _SUMS and sum(c.place == low.place and c.name == low.name for c, _, _ in before) >= REPEATED:
        return "accumulation"
    if low.name in _DIFFERENCES and reference.output.peak < CANCELS * size:
        return "cancellation"
    if low.output.zeros > reference.output.zeros and reference.output.peak < torch.finfo(low.output.dtype).tiny:
        return "underflow"
    if low.name in _SUMS and low.output.dtype in (torch.bfloat16, torch.float16):
        return "accumulation"
    return "precision_lost"


def _helping_scale(way: Way, parity: Parity) -> float | None:
    """A factor on the loss with which the gradient is right: it was too small for float16."""
    if parity.dtype is not torch.float16 or not parity.finite:
        return None
    reference = way.reference
    expected = first_gradient(reference)
    peak = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    if not 0.0 < peak < 1.0:
        return None
    scale = 2.0 ** min(24, math.floor(math.log2(64.0 / peak)))
    record = way.again(lambda watch: (Scaled(scale),))
    got = {n: g / scale for n, g in first_gradient(record, reference).items()}
    return scale if finite(got) and distance(expected, got) <= parity.measured / 2 else None


def _too_small(way: Way, calls: Sequence[Aligned], scale: float) -> Located:
    reference = way.reference
    expected, got = first_gradient(reference), first_gradient(way.record, reference)
    entries = sum(g.numel() for g in expected.values())
    lost = {n: int(((got[n] == 0) & (g != 0)).sum()) for n, g in expected.items() if n in got and len(got[n]) == len(g)}
    worst = next((c for c in reversed(calls) if c[0].gradient and c[1].gradient), None)
    return Located(
        "underflow",
        "backward",
        None,
        worst[0].gradient if worst else None,
        worst[1].gradient if worst else None,
        f"with the loss multiplied by {scale:g} before backward, and the gradient divided by it, they agree",
        share=sum(lost.values()) / max(1, entries),
        names=tuple(n for n, count in lost.items() if count) or tuple(expected),
    )


def _proved(way: Way, parity: Parity, found: Located) -> Located:
    """The same with what was seen when that part is computed in float32."""
    assert found.call is not None
    restored = InFloat32(found.call)
    record = way.again(restored.contexts)
    if record.raised is not None or not restored.met:
        return found
    reference = way.reference
    measured = distance(first_gradient(reference), first_gradient(record, reference))
    if not measured < max(2.0 * parity.explained, parity.measured / 4):
        return found
    part = f"module {found.call.module!r}" if found.call.module else "this line"
    shown = f"with {part} in float32 the gradient is {measured:.2g} from float64, in place of {_size(parity.measured)}"
    return Located(found.kind, found.direction, found.call, found.low, found.reference, shown, found.share)


def _size(error: float) -> str:
    return f"{error:.2g}" if math.isfinite(error) else "infinitely far"
