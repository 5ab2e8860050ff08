"""Two summands, one for each value of a label, that are the same function: the label says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.formulas.cut import Arguments, close
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    MULTIPLICATIONS,
    NEGATIONS,
    SUBTRACTIONS,
    VIEWS,
)
from pytest_trainloop.tracing.loss_slice import CannotReplay, Ref

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.loss_slice import Call, Slice

SETTINGS = 6
"""Settings of all that both summands are computed of, the first being that of the run."""

_SAME = VIEWS | CASTS


def equal_branches(found: Slice) -> Iterator[tuple[Call, int]]:
    """Sums of ``label * a`` and ``(1 - label) * b`` in which ``a`` and ``b`` are equal at all settings, each with the
    label's number."""
    needed = found.ancestors(found.root)
    for call in found.calls:
        if call.name not in ADDITIONS | SUBTRACTIONS or not needed.intersection(call.outputs) or len(call.inputs) != 2:
            continue
        sides = [_weighted(found, n) for n in call.inputs]
        for label, a in sides[0]:
            for other, b in sides[1]:
                for mine, its, theirs, complement in ((label, a, b, other), (other, b, a, label)):
                    turned = _complement(found, complement) == _bare(found, mine) and _label(found, mine)
                    if turned and _equal(found, its, theirs, mine) and _says_nothing(found, call, mine):
                        yield call, mine


def _bare(found: Slice, number: int) -> int:
    """A value before it was reshaped or cast."""
    while (call := found.call_of(number)) is not None and call.name in _SAME and len(call.inputs) == 1:
        number = call.inputs[0]
    return number


def _weighted(found: Slice, number: int) -> list[tuple[int, int]]:
    """Both ways to read a product of a value without a gradient and a learned one: past reshapes, signs and constant
    factors."""
    for _ in range(8):
        call = found.call_of(number)
        if call is None:
            return []
        if call.name in MULTIPLICATIONS and len(call.inputs) == 2:
            one, other = call.inputs
            learned = [found.values[n].requires_grad for n in (one, other)]
            if learned == [False, True]:
                pair = (one, other)
            elif learned == [True, False]:
                pair = (other, one)
            else:
                return []
            if found.values[pair[0]].tensor.numel() > 1:
                return [pair]
            number = pair[1]
            continue
        if call.name not in _SAME | NEGATIONS | MULTIPLICATIONS or len(call.inputs) != 1:
            return []
        number = call.inputs[0]
    return []


def _complement(found: Slice, number: int) -> int | None:
    """The value of which this one is 1 minus it."""
    call = found.call_of(_bare(found, number))
    if call is None or call.name not in SUBTRACTIONS or len(call.inputs) != 1 or 1.0 not in call.numbers:
        return None
    turned = call.name in {"rsub", "__rsub__"} or not isinstance(call.args[0], Ref)
    return _bare(found, call.inputs[0]) if turned else None


def _label(found: Slice, number: int) -> bool:
    """Whether a value of the batch is 0 and 1, and both."""
    tensor = found.values[number].tensor
    return bool(found.from_batch(number)) and set(tensor.flatten().tolist()) == {0.0, 1.0}


def _says_nothing(found: Slice, call: Call, label: int) -> bool:
    """Whether the sum stays the same with each label turned into the other one."""
    (number,) = call.outputs
    before, labels = found.values[number].tensor.double(), found.values[label].tensor
    try:
        (turned,) = found.replay({label: 1 - labels}, [number])
    except CannotReplay:
        return False
    return close(turned.detach().double(), before, float(before.abs().max()))


def _equal(found: Slice, a: int, b: int, label: int) -> bool:
    """Whether two values are equal in the run and wherever all that they are computed of is drawn anew."""
    if a == b:
        return True
    before = found.ancestors(a) | found.ancestors(b)
    if found.ancestors(label) & before or found.values[a].tensor.shape != found.values[b].tensor.shape:
        return False
    ends = tuple(n for n in sorted(before) if found.values[n].kind in {"layer", "batch", "unknown"})
    given = Arguments(found, ends)
    for index in range(SETTINGS):
        try:
            made = found.replay(dict(zip(ends, given.at(index), strict=True)), [a, b])
        except CannotReplay:
            return False
        left, right = (m.detach().double() for m in made)
        if not close(left, right, float(left.abs().max())) or bool((left == left.flatten()[0]).all()):
            return False
    return bool(torch.isfinite(found.values[a].tensor).any())
