"""One tensor whose gradient is lost in low precision, while the whole gradient is as far from float64 as rounding
explains: a small layer counts little in its length.

Single tensors scatter: those of few entries, and those whose gradient nearly cancels (a bias before a norm). So a
tensor is judged only where roundings leave its gradient meaningful, and named only where one operation is wrong and
the tensor right again once that is computed in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytest_trainloop.checks.numerics.precision_parity.expected_error import unit_roundoff
from pytest_trainloop.checks.numerics.precision_parity.first_gradient import distance, first_gradient
from pytest_trainloop.checks.numerics.precision_parity.float32_regions import InFloat32
from pytest_trainloop.checks.numerics.precision_parity.locate import FAR, Located, wrong_operations
from pytest_trainloop.checks.numerics.precision_parity.runs import NOISE, PASSES, Parity
from pytest_trainloop.errors import CannotDecide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.precision_parity.runs import LowPrecisionRuns
    from pytest_trainloop.gradients.vectors import Gradient

CANCELLED = 1e-9
"""Share of the whole gradient's length up to which a tensor's is what float64 leaves of 0."""

MEANINGFUL = 0.1
"""Relative error that rounding may explain of a gradient that is judged."""

SEEDS = (*NOISE, 3, 4, 5, 6)
"""Of the roundings: a tensor of one entry lies ten times beyond the largest of seven normal errors once in 1e5."""

MOST = 4
"""Tensors, and regions, that are tried."""


class LostTensor(NamedTuple):
    """A parameter whose gradient is lost, and the operation that loses it."""

    name: str
    parity: Parity
    found: Located
    share: float
    """Of the whole gradient's length."""


def lost_tensor(runs: LowPrecisionRuns) -> LostTensor | None:
    """The first tensor whose gradient one operation loses."""
    if runs.low is None:
        return None
    expected, gradient = first_gradient(runs.reference), first_gradient(runs.record, runs.reference)
    whole = _length(expected)
    suspects = {n: apart for n, apart in _apart(expected, gradient) if _length({n: expected[n]}) > CANCELLED * whole}
    suspects = {n: apart for n, apart in suspects.items() if apart > FAR * unit_roundoff(runs.low)}
    if not suspects or len(suspects) == len(expected):
        return None
    explained = dict.fromkeys(suspects, unit_roundoff(runs.low))
    for seed in SEEDS:
        rounded = first_gradient(runs.rounded(seed))
        for name, apart in _apart(expected, rounded):
            if name in explained:
                explained[name] = max(explained[name], apart)
        explained = {n: e for n, e in explained.items() if e <= MEANINGFUL and suspects[n] > FAR * e}
        if not explained:
            return None
    again = dict(_apart(expected, first_gradient(runs.again(), runs.reference)))
    names = [n for n in explained if again.get(n) == suspects[n]][:MOST]
    for name in sorted(names, key=lambda n: -suspects[n] / explained[n]):
        parity = Parity(dtype=runs.low, measured=suspects[name], explained=explained[name], finite=True)
        found = _loses(runs, name, parity, expected)
        if found is not None:
            return LostTensor(name, parity, found, _length({name: expected[name]}) / whole)
    return None


def _loses(runs: LowPrecisionRuns, name: str, parity: Parity, expected: Gradient) -> Located | None:
    """The operation that is wrong, and with whose region in float32 the tensor's gradient is right."""
    try:
        wrong = wrong_operations(runs, parity)
    except CannotDecide:
        return None
    tried: set[tuple[str, object]] = set()
    layer = name.rpartition(".")[0]
    for found in sorted(wrong, key=lambda w: w.operation is None or not layer.startswith(w.operation.module or layer)):
        operation = found.operation
        if operation is None or len(tried) >= MOST:
            continue
        key = (operation.module, "" if operation.module else operation.place)
        if key in tried:
            continue
        tried.add(key)
        region = InFloat32(operation)
        record = runs.again(region.contexts)
        if record.raised is not None or not region.met:
            continue
        left = dict(_apart(expected, first_gradient(record, runs.reference))).get(name, parity.measured)
        if left <= max(PASSES * parity.explained, parity.measured / FAR):
            where = f"module {operation.module!r}" if operation.module else "this line"
            shown = (
                f"with {where} in float32 the gradient of {name} is {left:.2g} from float64, not {parity.measured:.2g}"
            )
            return replace(found, shown_by=shown, left=left, names=(name,))
    return None


def _apart(expected: Gradient, other: Gradient) -> Iterator[tuple[str, float]]:
    for name, entries in expected.items():
        if name in other and len(other[name]) == len(entries) and bool(entries.any()):
            yield name, distance({name: entries}, {name: other[name]})


def _length(gradient: Gradient) -> float:
    return (
        float(torch.stack([g.double().square().sum().cpu() for g in gradient.values()]).sum().sqrt())
        if gradient
        else 0.0
    )
