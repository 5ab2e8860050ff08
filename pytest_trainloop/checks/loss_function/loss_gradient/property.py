"""Is the gradient that of the value? Autograd against central differences in float64, along random directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.losses.calls import size_of
from pytest_trainloop.losses.search import Seen
from pytest_trainloop.strategies.loss_cases import Inputs, inputs_of

if TYPE_CHECKING:
    from pytest_trainloop.losses.calls import Answer
    from pytest_trainloop.losses.evidence import Loss
    from pytest_trainloop.strategies.loss_cases import Case

EPS = torch.finfo(torch.float64).eps
STEP = EPS ** (1 / 3)
"""The step at which truncation (step squared) and rounding (eps / step) of a central difference are alike."""

SURE = 1e-3
"""What two slopes that are one may differ by, of their size. Truncation and rounding are 4e-11 of it for a smooth loss;
the two step sizes must agree within a tenth of it, so a kink between them, or a curvature that large, is not judged."""

ROUNDINGS = 100
"""Roundings on the way to a value of a few rows; each moves a difference by eps / step of the value's size."""

DIRECTIONS = 2


@dataclass(frozen=True, slots=True)
class _Slopes:
    """Along one direction: the gradient's slope, and that of the values."""

    told: float
    seen: float
    floor: float

    @property
    def differ(self) -> bool:
        return abs(self.told - self.seen) > SURE * max(abs(self.told), abs(self.seen)) + self.floor

    @property
    def flat(self) -> bool:
        return abs(self.seen) <= self.floor


def look(loss: Loss, case: Case) -> Seen | None:
    """How the gradient differs from the slope of the value, and what that shows."""
    inputs = inputs_of(loss.contract, case)
    answer = loss.wide(inputs)
    if not answer.finite:
        raise CannotDecide("the value is not finite")
    if loss.wide(inputs, grad=False, seed=1).total != answer.total:
        raise CannotDecide("the criterion draws random numbers")
    if all(g is None for g in answer.grads):
        return _no_history(answer)
    slopes = [s for number in range(DIRECTIONS) for s in _along(loss, inputs, answer, case.seed + number)]
    if not slopes:
        raise CannotDecide("the value has a kink, or jumps, next to every point that was drawn")
    if not any(s.differ for s in slopes):
        return _scaled(loss, inputs, answer.grads)
    if all(g is None or not bool(g.any()) for g in answer.grads):
        return _cut(slopes)
    if all(s.flat for s in slopes):
        return None  # a straight-through estimator: the value is flat, and the gradient is meant
    return _wrong(loss, inputs, slopes)


def _along(loss: Loss, inputs: Inputs, answer: Answer, seed: int) -> list[_Slopes]:
    """The two slopes along one direction in the first output that the gradient reaches, where the value is smooth."""
    reached = [i for i, g in enumerate(answer.grads) if g is not None and bool(g.any())] or [0]
    which = reached[seed % len(reached)]
    output = inputs.outputs[which]
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    direction = _inside(loss, output, direction)
    far, near = (_difference(loss, inputs, which, direction, h) for h in (STEP, STEP / 2))
    if not (math.isfinite(far) and math.isfinite(near)):
        return []
    floor = ROUNDINGS * EPS / STEP * size_of(answer, inputs)
    if abs(far - near) > SURE / 10 * max(abs(far), abs(near)) + floor:
        return []
    grad = answer.grads[which]
    told = 0.0 if grad is None else float((grad * direction).sum())
    return [_Slopes(told, (4.0 * near - far) / 3.0, floor)]


def _inside(loss: Loss, output: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """A direction that stays where the contract's outputs lie: within bounds each entry moves by less than its own
    distance from them."""
    if loss.contract.expects == "probabilities":
        return direction * output * (1.0 - output)
    low, high = loss.contract.output_range
    for bound in (low, high):
        direction = direction * (output - bound).abs().clamp(max=1.0) if math.isfinite(bound) else direction
    return direction


def _difference(loss: Loss, inputs: Inputs, which: int, direction: torch.Tensor, h: float) -> float:
    totals = []
    for sign in (1.0, -1.0):
        outputs = list(inputs.outputs)
        outputs[which] = outputs[which] + sign * h * direction
        totals.append(loss.wide(Inputs(tuple(outputs), inputs.target), grad=False).total)
    return (totals[0] - totals[1]) / (2.0 * h)


def _no_history(answer: Answer) -> Seen:
    return Seen(
        cause="graph_cut",
        summary="the value has no history of the output: backward() raises, or gives it nothing",
        measured=f"the value is {answer.total:.6g}, and autograd gives no gradient",
        shown_by="no path leads from the value back to an output",
    )


def _cut(slopes: list[_Slopes]) -> Seen:
    return Seen(
        cause="graph_cut",
        summary="no gradient reaches the output, although the value depends on it",
        measured=f"slopes of the value: {_list([s.seen for s in slopes])}; of the gradient: 0",
        shown_by="the value changes when the output is moved, and autograd gives nothing or zeros",
    )


def _scaled(loss: Loss, inputs: Inputs, grads: tuple[torch.Tensor | None, ...]) -> Seen | None:
    """Twice the loss must have twice the gradient: a backward pass that leaves out what it is given does not."""
    twice = loss.wide(inputs, scale=2.0).grads
    for once, doubled in zip(grads, twice, strict=True):
        if once is not None and doubled is not None and bool(once.any()) and torch.equal(once, doubled):
            return _unscaled(float(once.norm()))
    return None


def _unscaled(norm: float) -> Seen:
    return Seen(
        cause="grad_output_ignored",
        summary="the gradient of twice the loss is that of the loss: its backward() leaves out grad_output",
        measured=f"|gradient| {norm:.6g} of the loss, {norm:.6g} of twice the loss",
        shown_by="the gradient is the same, bit for bit, whatever it is multiplied by",
    )


def _wrong(loss: Loss, inputs: Inputs, slopes: list[_Slopes]) -> Seen | None:
    told, seen = _list([s.told for s in slopes]), _list([s.seen for s in slopes])
    measured = f"slopes of the value {seen}; of the gradient {told}"
    scaled = _scaled(loss, inputs, loss.wide(inputs).grads)
    if scaled is not None:
        return scaled
    ratios = [s.told / s.seen for s in slopes if not s.flat]
    custom = loss.wide.custom_functions(inputs)
    if not custom:
        return Seen(
            cause="part_detached",
            summary="the gradient is not that of the whole value: a part of it has no history",
            measured=measured,
            shown_by="no operation with a backward pass of its own takes part",
        )
    if len(ratios) > 1 and max(ratios) - min(ratios) <= SURE * max(map(abs, ratios)):
        return Seen(
            cause="scaled_backward",
            summary=f"{custom[0]} gives {ratios[0]:.4g} times the gradient of its value",
            measured=measured,
            shown_by="the factor is the same along every direction, as where a gradient is reversed on purpose",
        )
    return Seen(
        cause="wrong_backward",
        summary=f"the backward pass of {custom[0]} is not the derivative of its forward pass",
        measured=measured,
        shown_by="central differences with two step sizes agree with each other, and not with the gradient",
    )


def _list(numbers: list[float]) -> str:
    return ", ".join(f"{n:.5g}" for n in numbers)
