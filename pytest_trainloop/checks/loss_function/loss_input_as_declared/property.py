"""Whether the criterion takes its output for what the contract says it is: by the change of the value when all classes
are shifted, and by the exact values of cross-entropy for inputs that are not logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.instruments.losses.calls import CallResult, same, size_of
from pytest_trainloop.instruments.strategies.loss_cases import LossInputs, class_axis, inputs_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.instruments.losses.evidence import Loss
    from pytest_trainloop.instruments.strategies.loss_cases import Case

CONFIDENT = 1000.0
"""A logit so large that its softmax and sigmoid are exactly 0 and 1 in float64, where exp(-1000) underflows."""

DIGITS = 8
"""Digits to which exact values are compared."""


def misread_output(loss: Loss, case: Case) -> Finding | None:
    """What the criterion takes its output for, where that is not what the contract says."""
    contract = loss.contract
    inputs = inputs_of(contract, case)
    if inputs.target is None:
        return _logits_of_two_models(loss, inputs)
    taken_for_logits = _probabilities_as_logits(loss, inputs, inputs.target)
    if taken_for_logits is not None:
        return taken_for_logits
    if contract.target == "binary":
        return None
    start = loss.float64(inputs)
    if contract.expects == "log_probabilities":
        return _target_as_logarithm(loss, inputs, start) or _normalised_again(loss, inputs, start)
    if contract.expects == "probabilities":
        return _probabilities_as_logarithms(loss, inputs, start)
    probabilities = replace(inputs, outputs=(inputs.outputs[0].softmax(class_axis(contract)), *inputs.outputs[1:]))
    return _probabilities_as_logarithms(loss, probabilities, start) or _shifted(loss, inputs, start)


def _logits_of_two_models(loss: Loss, inputs: LossInputs) -> Finding | None:
    """The divergence of student and teacher: of their logits, where the student's are taken for logarithms."""
    if loss.contract.expects != "logits" or len(inputs.outputs) != 2:
        return None
    axis = class_axis(loss.contract)
    student, teacher = inputs.outputs
    start = loss.float64(inputs, grad=False)
    for output in (student.softmax(axis), student):
        wrong = float((teacher.softmax(axis) * (teacher.log_softmax(axis) - output)).sum())
        if _is_reduced(start.total, wrong, output, loss):
            return _no_logarithm(start)
    return None


def _one_hot(loss: Loss, target: torch.Tensor, *, wrong: bool) -> torch.Tensor:
    """The answer that gives each target, or with ``wrong`` another class, all of the probability."""
    contract, axis = loss.contract, class_axis(loss.contract)
    if contract.target == "binary":
        high = target == max(contract.labels)
        return (high != wrong).to(torch.float64)
    index = target if contract.target == "index" else target.argmax(axis)
    if wrong:
        index = (index + 1) % (contract.num_classes or 2)
    return torch.nn.functional.one_hot(index, contract.num_classes or 2).movedim(-1, axis).to(torch.float64)


def _probabilities_as_logits(loss: Loss, inputs: LossInputs, target: torch.Tensor) -> Finding | None:
    contract = loss.contract
    if len(inputs.outputs) > 1:
        return None
    if contract.target == "distribution":  # one class per row, so that the exact values are those of indices
        target = _one_hot(loss, target, wrong=False)
    if contract.expects == "log_probabilities" or (contract.target == "binary" and tuple(contract.labels) != (0, 1)):
        return None
    values: list[float] = []
    for wrong in (False, True):
        answer = _one_hot(loss, target, wrong=wrong)
        given = answer if contract.expects == "probabilities" else CONFIDENT * (2.0 * answer - 1.0)
        cost = _cost_of_one_hot(loss, answer, target)
        value = loss.float64(LossInputs((given,), target), grad=False).total
        if not any(same(value, c, cost.sum().item()) for c in (cost.mean().item(), cost.sum().item())):
            return None
        values.append(value)
    activation = "sigmoid" if contract.target == "binary" else "softmax"
    return Finding(
        cause="probabilities_as_logits",
        summary=f"probabilities are taken for logits: a confident and correct answer still costs {values[0]:.4g}",
        measured=f"{values[0]:.6g} for confident correct answers, {values[1]:.6g} for confident wrong ones",
        shown_by=f"these are cross-entropy's values for the one-hot vector as logits, to {DIGITS} digits"
        + (f": the logits pass a {activation}, or a similar function, first" if contract.expects == "logits" else ""),
    )


def _cost_of_one_hot(loss: Loss, answer: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each target for a one-hot answer in place of logits."""
    functional, axis = torch.nn.functional, class_axis(loss.contract)
    if loss.contract.target == "binary":
        return functional.binary_cross_entropy_with_logits(answer, target, reduction="none")
    rows = answer.movedim(axis, -1).reshape(-1, answer.shape[axis])
    index = target if loss.contract.target == "index" else target.argmax(axis)
    return functional.cross_entropy(rows, index.reshape(-1), reduction="none")


def _shifts(inputs: LossInputs, axis: int) -> torch.Tensor:
    """One number for each position, the same for all its classes."""
    shape = list(inputs.outputs[0].shape)
    shape[axis] = 1
    generator = torch.Generator().manual_seed(sum(shape))
    return 1.0 + torch.rand(shape, generator=generator, dtype=torch.float64)


def _change(loss: Loss, inputs: LossInputs, start: CallResult, by: torch.Tensor) -> float:
    """The change of the value when the first output is shifted."""
    shifted = replace(inputs, outputs=(inputs.outputs[0] + by, *inputs.outputs[1:]))
    change = loss.float64(shifted, grad=False).total - start.total
    if not math.isfinite(change):
        raise CannotDecide("the value is not finite for shifted outputs")
    return change


def _shifted(loss: Loss, inputs: LossInputs, start: CallResult) -> Finding | None:
    if loss.contract.output_range != (-math.inf, math.inf):
        raise CannotDecide("shifted logits are outside of LossContract.output_range")
    axis, size = class_axis(loss.contract), size_of(start, inputs)
    by = _shifts(inputs, axis)
    change = _change(loss, inputs, start, by)
    if same(change, 0.0, size):
        return None
    measured = f"{change:+.4g} for a shift of all classes by 1 to 2; the value is {start.total:.4g}"
    constant = torch.ones_like(by)
    one, ten = (_change(loss, inputs, start, k * constant) for k in (1.0, 10.0))
    if same(ten, 10.0 * one, 10.0 * size) and one < 0 and not same(one, 0.0, size):
        return Finding(
            cause="linear_in_logits",
            summary=f"adding 10 to all logits lowers the loss by {-ten:.4g}: it is not normalised over the classes",
            measured=f"{one:+.6g} for a shift by 1, {ten:+.6g} for a shift by 10",
            shown_by="the change is exactly proportional to the shift, so the loss falls without bound",
        )
    other = next(_axes_without_change(loss, inputs, start, axis), None)
    if other is not None:
        return Finding(
            cause="wrong_axis",
            summary=f"the loss is normalised over axis {other}, and the classes lie on axis {axis}",
            measured=measured,
            shown_by=f"a number added along axis {other} changes nothing, one added along axis {axis} does",
        )
    if _per_class(loss, inputs, start):
        return None
    return Finding(
        cause="not_invariant",
        level="advice",
        summary="adding a number to all logits of a row changes the loss",
        measured=measured,
        shown_by="classes are not judged one by one either, as one-against-all losses do",
    )


def _axes_without_change(loss: Loss, inputs: LossInputs, start: CallResult, axis: int) -> Iterator[int]:
    for other, length in enumerate(inputs.outputs[0].shape):
        if other != axis and length > 1:
            change = _change(loss, inputs, start, _shifts(inputs, other))
            if same(change, 0.0, size_of(start, inputs)):
                yield other


def _per_class(loss: Loss, inputs: LossInputs, start: CallResult) -> bool:
    """Whether the changes by two classes of one position add up: their second difference is 0."""
    steps = [torch.zeros_like(inputs.outputs[0]) for _ in (0, 1)]
    for c, step in enumerate(steps):
        step.movedim(class_axis(loss.contract), -1)[..., c] = 0.5
    one, other, both = (_change(loss, inputs, start, by) for by in (*steps, steps[0] + steps[1]))
    return same(both, one + other, size_of(start, inputs) + abs(both))


def _normalised_again(loss: Loss, inputs: LossInputs, start: CallResult) -> Finding | None:
    change = _change(loss, inputs, start, _shifts(inputs, class_axis(loss.contract)))
    if not same(change, 0.0, size_of(start, inputs)):
        return None
    return Finding(
        cause="normalised_again",
        level="advice",
        summary="log-probabilities are normalised once more, which changes nothing",
        measured=f"{change:+.2g} for a shift of all classes by 1 to 2",
        shown_by="the value is invariant to a shift of the output, which only a loss of logits is",
    )


def _target_as_logarithm(loss: Loss, inputs: LossInputs, start: CallResult) -> Finding | None:
    output, target = inputs.outputs[0], inputs.target
    if loss.contract.target != "distribution" or target is None:
        return None
    wrong = float((target.exp() * (target - output)).sum())
    if not _is_reduced(start.total, wrong, output, loss):
        return None
    return Finding(
        cause="target_as_logarithm",
        summary="target probabilities are taken for their logarithms",
        measured=f"the value is {start.total:.6g}, that of a divergence with log_target=True",
        shown_by=f"the sum of exp(t) (t - log p) over the classes, to {DIGITS} digits",
    )


def _probabilities_as_logarithms(loss: Loss, inputs: LossInputs, start: CallResult) -> Finding | None:
    output, target = inputs.outputs[0], inputs.target
    if target is None:
        return None
    if loss.contract.target == "distribution":
        wrong = float((target * (target.log() - output)).sum())
        return _no_logarithm(start) if _is_reduced(start.total, wrong, output, loss) else None
    picked = -float(output.movedim(class_axis(loss.contract), -1).gather(-1, target[..., None]).sum())
    if not _is_reduced(start.total, picked, output, loss):
        return None
    return Finding(
        cause="linear_in_probabilities",
        level="advice",
        summary="the loss is minus the probability of the correct class, not its logarithm",
        measured=f"the value is {start.total:.6g}",
        shown_by=f"minus the probabilities of the targets, to {DIGITS} digits",
    )


def _no_logarithm(start: CallResult) -> Finding:
    return Finding(
        cause="probabilities_as_logarithms",
        summary="the output is taken for logarithms, which it is not: the divergence can be negative",
        measured=f"the value is {start.total:.6g}",
        shown_by=f"the sum of t (log t - p) over the classes, to {DIGITS} digits",
    )


def _is_reduced(value: float, total: float, output: torch.Tensor, loss: Loss) -> bool:
    """Whether a value is this sum, or its mean over entries, positions or rows."""
    entries, rows = output.numel(), output.shape[0]
    counts = {1, entries, rows, entries // output.shape[class_axis(loss.contract)]}
    return any(same(value * n, total, abs(total) + 1.0) for n in counts)
