"""Differences of a value from itself that go into what is backpropagated."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.every_term_trains.names import source_of
from pytest_trainloop.checks.loss.every_term_trains.slopes import slope_at
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import CASTS, DISTANCE_LOSSES, SOFTMAXES, SUBTRACTIONS
from pytest_trainloop.tracing.equal_values import EqualValues
from pytest_trainloop.tracing.loss_slice import Ref
from pytest_trainloop.tracing.loss_tape import Tapes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    import torch

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.loss_slice import Call, Slice

_FLAT_AT_ZERO = DISTANCE_LOSSES | {"cosine_similarity", "kl_div"}
"""The slope is 0 where both sides are equal, also where one of them is detached; of ``kl_div`` that by the scores."""

_EITHER_SIDE = frozenset({"pairwise_distance", "dist"})
"""The slope of one side alone is not 0."""

_COMPARISONS = SUBTRACTIONS | _FLAT_AT_ZERO | _EITHER_SIDE

_ROUNDED = 1e-12
"""Of a value in float64, what is shown as 0."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    part: Slice
    call: Call
    sides: tuple[int, int]
    of: Hashable
    """What is compared with itself; None where the sides differ."""
    trains: bool = False


def same_sides(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each line that compares a value with itself, in every turn and every step that was seen."""
    by_line: dict[Place, list[_Comparison]] = defaultdict(list)
    for number, part in enumerate(evidence.shared(Tapes.of).slices):
        for comparison in _comparisons(part, number):
            by_line[comparison.call.place].append(comparison)
    trained = {c.of for found in by_line.values() for c in found if c.trains}
    for place, found in by_line.items():
        if any(c.of is None or c.of in trained for c in found) or _written_alike(place):
            continue
        counted = [c for c in found if _counts(c)]
        if counted:
            yield _finding(place, counted)


def _comparisons(part: Slice, number: int) -> Iterator[_Comparison]:
    values = EqualValues(part)
    for call in part.calls:
        sides = _sides(part, call) if call.name in _COMPARISONS and not call.writes else None
        if sides is None:
            continue
        if not values.equal(*sides) or not part.values[sides[0]].tensor.is_floating_point():
            yield _Comparison(part, call, sides, None)
            continue
        of = (number, values.key(sides[0]))
        yield _Comparison(part, call, sides, of, trains=not values.alike(*sides) and _has_slope(part, call))


def _sides(part: Slice, call: Call) -> tuple[int, int] | None:
    """What is compared; of distributions, the scores that both are the softmax of."""
    given = [*call.args, *(call.kwargs[name] for name in ("target", "other", "x2") if name in call.kwargs)]
    if len(given) < 2 or not (isinstance(given[0], Ref) and isinstance(given[1], Ref)):
        return None
    if call.name != "kl_div":
        return given[0].number, given[1].number
    one, other = (_squash(part, ref.number) for ref in given[:2])
    if one is None or other is None or one.name != "log_softmax":
        return None
    same_axis = (one.args[1:], one.kwargs) == (other.args[1:], other.kwargs)
    return (one.inputs[0], other.inputs[0]) if same_axis else None


def _squash(part: Slice, number: int) -> Call | None:
    """The softmax that a value was made by, past where it was detached."""
    call = part.call_of(number)
    while call is not None and call.name in CASTS and len(call.inputs) == 1:
        call = part.call_of(call.inputs[0])
    return call if call is not None and call.name in SOFTMAXES and len(call.inputs) == 1 else None


def _has_slope(part: Slice, call: Call) -> bool:
    """Whether a comparison one side of which is detached trains the other: x + (y - y.detach()), a ratio of
    probabilities that is 1."""
    if call.name in _FLAT_AT_ZERO:
        return False
    if call.name in _EITHER_SIDE:
        return True
    slope = slope_at(part, call.outputs[0], 0.0)
    return slope is None or bool(slope.ne(0).any())


def _counts(found: _Comparison) -> bool:
    """Whether what is backpropagated would be another if the sides were not the same."""
    slope = slope_at(found.part, found.call.outputs[0], 1.0)
    return slope is not None and bool((slope.ne(0) & slope.isfinite()).any())


@functools.lru_cache(maxsize=256)
def _written_alike(place: Place) -> bool:
    """Whether the line says ``x - x``: a way to write 0."""
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and ast.dump(node.left) == ast.dump(node.right)
        for statement in source_of(place.file, place.line)
        for node in ast.walk(statement)
    )


def _finding(place: Place, found: Sequence[_Comparison]) -> Finding:
    part, call, sides = found[0].part, found[0].call, found[0].sides
    live = [part.values[n].requires_grad for n in sides]
    value = part.values[call.outputs[0]].tensor
    how = {
        2: "the slope of one side takes away that of the other",
        1: "one side is detached, and the slope of the other is 0 where they are equal",
        0: "neither side has a gradient",
    }[sum(live)]
    name = call.name.strip("_")
    return Finding(
        cause="compared_with_itself",
        summary=f"both sides of a difference ({name}) are one value: it is {_extent(value)} for every batch and all "
        "weights, and trains nothing",
        measured=f"{len(found)} comparisons in the first steps, of {tuple(part.values[sides[0]].tensor.shape)} each",
        shown_by=f"both are the same calls on the same tensors, and the loss depends on their difference; {how}",
        culprits=(name,),
        where=str(place),
    )


def _extent(value: torch.Tensor) -> str:
    first = float(value.flatten()[0]) if value.numel() else 0.0
    return f"{first if abs(first) > _ROUNDED else 0.0:.4g}"
