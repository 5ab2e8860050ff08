"""Whether the gradient is that of the value: autograd against central differences in float64, in random directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.instruments.losses.calls import size_of
from pytest_trainloop.instruments.strategies.loss_cases import LossInputs, inputs_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_trainloop.instruments.losses.calls import CallResult
    from pytest_trainloop.instruments.losses.evidence import Loss
    from pytest_trainloop.instruments.strategies.loss_cases import Case

EPS = torch.finfo(torch.float64).eps
STEP = EPS ** (1 / 3)
"""The step at which truncation (step squared) and rounding (eps / step) of a central difference are equal."""

TOLERANCE = 1e-3
"""Largest relative difference of two equal slopes. Truncation and rounding are 4e-11 of a slope for a smooth loss; the
two step sizes must agree within a tenth of it, so a kink between them, or a curvature that large, is not judged."""

ROUNDINGS = 100
"""Roundings on the way to a value of a few rows; each changes a difference by eps / step of the value's size."""

DIRECTIONS = 2


@dataclass(frozen=True, slots=True)
class _Slopes:
    """Two slopes along one direction."""

    of_gradient: float
    of_value: float
    rounding: float
    """The largest slope that rounding alone explains."""

    @property
    def differ(self) -> bool:
        larger = max(abs(self.of_gradient), abs(self.of_value))
        return abs(self.of_gradient - self.of_value) > TOLERANCE * larger + self.rounding

    @property
    def value_is_constant(self) -> bool:
        return abs(self.of_value) <= self.rounding


def gradient_error(loss: Loss, case: Case) -> Finding | None:
    """How the gradient differs from the slope of the value."""
    inputs = inputs_of(loss.contract, case)
    start = loss.float64(inputs)
    if not start.finite:
        raise CannotDecide("the value is not finite")
    if loss.float64(inputs, grad=False, seed=1).total != start.total:
        raise CannotDecide("the criterion draws random numbers")
    if all(g is None for g in start.grads):
        return Finding(
            cause="graph_cut",
            summary="autograd finds no path from the value to the output: backward() raises, or gives the output no "
            "gradient",
            measured=f"the value is {start.total:.6g}, and autograd gives no gradient",
            shown_by="no path leads from the value back to an output",
        )
    slopes = [s for number in range(DIRECTIONS) for s in _slopes(loss, inputs, start, case.seed + number)]
    if not slopes:
        raise CannotDecide("the value has a kink, or jumps, next to every point that was drawn")
    if not any(s.differ for s in slopes):
        return _ignores_grad_output(loss, inputs, start)
    if all(g is None or not bool(g.any()) for g in start.grads):
        return Finding(
            cause="graph_cut",
            summary="no gradient reaches the output, although the value depends on it",
            measured=f"slopes of the value: {_listed(s.of_value for s in slopes)}; of the gradient: 0",
            shown_by="the value changes with the output, and autograd gives nothing or zeros",
        )
    if all(s.value_is_constant for s in slopes):
        return None  # a straight-through estimator: the value is constant, and the gradient is intended
    return _ignores_grad_output(loss, inputs, start) or _wrong(loss, inputs, slopes)


def _slopes(loss: Loss, inputs: LossInputs, start: CallResult, seed: int) -> list[_Slopes]:
    """The slopes along one direction in the first output that the gradient reaches; none where the value is not
    smooth."""
    reached = [i for i, g in enumerate(start.grads) if g is not None and bool(g.any())] or [0]
    which = reached[seed % len(reached)]
    output = inputs.outputs[which]
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    direction = _within_range(loss, output, direction)
    far, near = (_difference(loss, inputs, which, direction, h) for h in (STEP, STEP / 2))
    if not (math.isfinite(far) and math.isfinite(near)):
        return []
    rounding = ROUNDINGS * EPS / STEP * size_of(start, inputs)
    if abs(far - near) > TOLERANCE / 10 * max(abs(far), abs(near)) + rounding:
        return []
    grad = start.grads[which]
    of_gradient = 0.0 if grad is None else float((grad * direction).sum())
    return [_Slopes(of_gradient, (4.0 * near - far) / 3.0, rounding)]


def _within_range(loss: Loss, output: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """The direction scaled so that outputs stay in the contract's range: each entry changes by less than its distance
    from a bound."""
    if loss.contract.expects == "probabilities":
        return direction * output * (1.0 - output)
    low, high = loss.contract.output_range
    for bound in (low, high):
        direction = direction * (output - bound).abs().clamp(max=1.0) if math.isfinite(bound) else direction
    return direction


def _difference(loss: Loss, inputs: LossInputs, which: int, direction: torch.Tensor, h: float) -> float:
    totals = []
    for sign in (1.0, -1.0):
        outputs = list(inputs.outputs)
        outputs[which] = outputs[which] + sign * h * direction
        totals.append(loss.float64(LossInputs(tuple(outputs), inputs.target), grad=False).total)
    return (totals[0] - totals[1]) / (2.0 * h)


def _ignores_grad_output(loss: Loss, inputs: LossInputs, start: CallResult) -> Finding | None:
    """Twice the loss must have twice the gradient; with a backward pass that ignores ``grad_output`` it has not."""
    twice = loss.float64(inputs, scale=2.0).grads
    for once, doubled in zip(start.grads, twice, strict=True):
        if once is not None and doubled is not None and bool(once.any()) and torch.equal(once, doubled):
            norm = float(once.norm())
            return Finding(
                cause="grad_output_ignored",
                summary="the gradient of twice the loss is that of the loss: its backward() ignores grad_output",
                measured=f"|gradient| {norm:.6g} of the loss, {norm:.6g} of twice the loss",
                shown_by="the gradient is the same, bit for bit, whatever the loss is multiplied by",
            )
    return None


def _wrong(loss: Loss, inputs: LossInputs, slopes: list[_Slopes]) -> Finding:
    of_value, of_gradient = _listed(s.of_value for s in slopes), _listed(s.of_gradient for s in slopes)
    measured = f"slopes of the value {of_value}; of the gradient {of_gradient}"
    ratios = [s.of_gradient / s.of_value for s in slopes if not s.value_is_constant]
    custom = loss.float64.custom_functions(inputs)
    if not custom:
        return Finding(
            cause="part_detached",
            level="advice",
            summary="the gradient is not that of the whole value: a part of it has no history",
            measured=measured,
            shown_by="no custom backward pass takes part",
        )
    if len(ratios) > 1 and max(ratios) - min(ratios) <= TOLERANCE * max(map(abs, ratios)):
        return Finding(
            cause="scaled_backward",
            level="advice",
            summary=f"{custom[0]} gives {ratios[0]:.4g} times the gradient of its value",
            measured=measured,
            shown_by="the factor is the same along every direction, as where a gradient is reversed on purpose",
        )
    return Finding(
        cause="wrong_backward",
        summary=f"the backward pass of {custom[0]} is not the derivative of its forward pass",
        measured=measured,
        shown_by="central differences with two step sizes agree with each other, and not with the gradient",
    )


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{n:.5g}" for n in numbers)
