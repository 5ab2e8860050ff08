"""Terms that are a constant by the calls between the weights and what is backpropagated: a value that is compared with
itself, and a choice that always takes the value a mask was filled with."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.dead_values import statement_at
from pytest_trainloop.checks.loss.every_term_trains.causes import found
from pytest_trainloop.checks.loss.every_term_trains.equal_values import EqualValues
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay, Ref
from pytest_trainloop.instruments.tracing.loss_tape import Tapes
from pytest_trainloop.recording.torch_names import CASTS, DISTANCE_LOSSES, EXTREMES, SOFTMAXES, SUBTRACTIONS

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence

_FLAT_AT_ZERO = DISTANCE_LOSSES | {"cosine_similarity", "kl_div"}
"""The slope is 0 where both sides are equal, also where one of them is detached; of ``kl_div`` that by the scores."""

_EITHER_SIDE = frozenset({"pairwise_distance", "dist"})
"""The slope of one side alone is not 0."""

_COMPARISONS = SUBTRACTIONS | _FLAT_AT_ZERO | _EITHER_SIDE

_ROUNDED = 1e-12
"""Of a value in float64, what is shown as 0."""

_FAR = 1e4
"""A fill is at least so many times as large as any other entry."""


def _slope_at(part: Slice, number: int, size: float) -> torch.Tensor | None:
    """The derivative of what is backpropagated by a value, with random numbers of a size added to it; None where the
    calls between cannot be made again."""
    made = part.values[number].tensor
    random = torch.Generator().manual_seed(3)
    noise = torch.randn(made.shape, generator=random, dtype=torch.float64).to(made)
    given = (made + size * noise).requires_grad_()
    try:
        (root,) = part.replay({number: given}, [part.root])
    except CannotReplay:
        return None
    if not root.requires_grad or root.numel() != 1:
        return None
    (slope,) = torch.autograd.grad(root, given, allow_unused=True)
    return slope


def _matters(part: Slice, number: int, size: float) -> bool:
    """Whether what is backpropagated would be another with another value."""
    slope = _slope_at(part, number, size)
    return slope is not None and bool((slope.ne(0) & slope.isfinite()).any())


@dataclass(frozen=True, slots=True)
class _Comparison:
    part: Slice
    call: Call
    sides: tuple[int, int]
    of: Hashable
    """What is compared with itself; None where the sides differ."""
    trains: bool = False
    """Whether one side is detached, and the slope of the other is not 0: x + (y - y.detach()), a ratio of probabilities
    that is 1."""


def same_sides(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each line that compares a value with itself, in every turn and every step that was seen."""
    by_line: dict[Place, list[_Comparison]] = defaultdict(list)
    for number, part in enumerate(evidence.shared(Tapes.of).slices):
        for comparison in _comparisons(part, number):
            by_line[comparison.call.place].append(comparison)
    trained = {c.of for compared in by_line.values() for c in compared if c.trains}
    for place, compared in by_line.items():
        if any(c.of is None or c.of in trained for c in compared) or _is_a_way_to_write_0(place):
            continue
        counted = [c for c in compared if _matters(c.part, c.call.outputs[0], 1.0)]
        if counted:
            part, call, sides = counted[0].part, counted[0].call, counted[0].sides
            live = sum(part.values[n].requires_grad for n in sides)
            made = part.values[call.outputs[0]].tensor
            value = float(made.flatten()[0]) if made.numel() else 0.0
            facts = {"value": f"{value if abs(value) > _ROUNDED else 0.0:.4g}", "both": live == 2, "one": live == 1}
            facts |= {"shape": str(tuple(part.values[sides[0]].tensor.shape)), "comparisons": len(counted)}
            yield found("compared_with_itself", place, (call.name.strip("_"),), **facts)


def _comparisons(part: Slice, number: int) -> Iterator[_Comparison]:
    values = EqualValues(part)
    for call in part.calls:
        sides = _sides(part, call) if call.name in _COMPARISONS and not call.writes else None
        if sides is None:
            continue
        if not values.equal(*sides) or not part.values[sides[0]].tensor.is_floating_point():
            yield _Comparison(part, call, sides, None)
            continue
        trains = not values.same_slope(*sides) and call.name not in _FLAT_AT_ZERO
        if trains and call.name not in _EITHER_SIDE:
            slope = _slope_at(part, call.outputs[0], 0.0)
            trains = slope is None or bool(slope.ne(0).any())
        yield _Comparison(part, call, sides, (number, values.key(sides[0])), trains)


def _sides(part: Slice, call: Call) -> tuple[int, int] | None:
    """What is compared; of distributions, the scores that both are the softmax of."""
    given = [*call.args, *(call.kwargs[name] for name in ("target", "other", "x2") if name in call.kwargs)]
    if len(given) < 2 or not (isinstance(given[0], Ref) and isinstance(given[1], Ref)):
        return None
    if call.name != "kl_div":
        return given[0].number, given[1].number
    squashed = []
    for ref in given[:2]:
        made = part.call_of(ref.number)
        while made is not None and made.name in CASTS and len(made.inputs) == 1:  # past where it was detached
            made = part.call_of(made.inputs[0])
        if made is None or made.name not in SOFTMAXES or len(made.inputs) != 1:
            return None
        squashed.append(made)
    one, other = squashed
    same_axis = (one.args[1:], one.kwargs) == (other.args[1:], other.kwargs)
    return (one.inputs[0], other.inputs[0]) if same_axis and one.name == "log_softmax" else None


@functools.lru_cache(maxsize=256)
def _is_a_way_to_write_0(place: Place) -> bool:
    """Whether the line says ``x - x``."""
    located = statement_at(place.file, place.line)
    return located is not None and any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and ast.dump(node.left) == ast.dump(node.right)
        for node in ast.walk(located[0])
    )


def chosen_fills(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each line that chooses the fill in every row of every step that was seen."""
    by_line: dict[Place, list[tuple[Slice, Call, float, Call] | None]] = defaultdict(list)
    for part in evidence.shared(Tapes.of).slices:
        for call in part.calls:
            if call.name in EXTREMES and not call.writes:
                fill = _fill(part, call)
                later = (c for c in part.calls if fill is not None and c.number > call.number)
                cut = next((c for c in later if fill and _cuts(part, c, call.outputs[0], fill)), None)
                by_line[call.place].append(None if cut is None or fill is None else (part, call, fill, cut))
    for chosen in by_line.values():
        if chosen[0] is not None and all(chosen):
            part, choice, fill, cut = chosen[0]
            facts = {"fill": fill, "cut": cut.name, "cut_at": str(cut.place).partition("   ")[0], "calls": len(chosen)}
            facts |= {"left": float(part.values[cut.outputs[0]].tensor.flatten()[0])}
            facts |= {"rows": part.values[choice.outputs[0]].tensor.numel()}
            name = choice.name.strip("_")
            yield found("fill_chosen", choice, (name,), "largest" if "max" in name else "smallest", **facts)


def _fill(part: Slice, call: Call) -> float | None:
    """The value that is chosen everywhere, although each choice has others that are small next to it."""
    if len(call.inputs) != 1 or not call.outputs or not part.values[call.inputs[0]].requires_grad:
        return None
    given, picked = (part.values[n].tensor for n in (call.inputs[0], call.outputs[0]))
    if not given.is_floating_point() or not picked.numel() or given.shape == picked.shape:
        return None
    axes = (*call.args[1:2], call.kwargs.get("dim"), call.kwargs.get("axis"))
    axis = next((value for value in axes if isinstance(value, int)), None)
    fill = float(picked.flatten()[0])
    unfilled = given != fill
    others = given[unfilled].abs()
    extreme = fill > 0 if "max" in call.name else fill < 0
    if not (picked == fill).all() or not extreme or not others.isfinite().all():
        return None
    if not (unfilled.any() if axis is None else unfilled.any(axis).all()) or abs(fill) < _FAR * float(others.max()):
        return None
    return fill


def _cuts(part: Slice, call: Call, picked: int, fill: float) -> bool:
    """Whether a call makes one small number of entries that are all as far off as the fill."""
    if call.func is None or len(call.outputs) != 1 or not call.args or not isinstance(call.args[0], Ref):
        return False
    number = call.args[0].number
    given, made = part.values[number].tensor, part.values[call.outputs[0]].tensor
    if not made.numel() or not made.is_floating_point() or not given.is_floating_point():
        return False
    if not part.depends(number, picked) or not (given.abs() >= abs(fill) / 2).all():
        return False
    constant = bool((made == made.flatten()[0]).all()) and float(made.abs().max()) * _FAR <= abs(fill)
    return constant and _matters(part, call.outputs[0], 0.0)
