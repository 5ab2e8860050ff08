"""Does the criterion take its output for what the contract says it is? By what a shift of all classes changes, and by
exact values of cross-entropy on what is no logit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.losses.calls import Answer, same, size_of
from pytest_trainloop.losses.search import Seen
from pytest_trainloop.strategies.loss_cases import Inputs, class_axis, inputs_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.losses.evidence import Loss
    from pytest_trainloop.strategies.loss_cases import Case

CONFIDENT = 1000.0
"""A logit so large that softmax and sigmoid of it are exactly 0 and 1 in float64, as exp(-1000) is no number there."""


def look(loss: Loss, case: Case) -> Seen | None:
    """What the criterion takes its output for, where that is not what the contract says."""
    contract = loss.contract
    inputs = inputs_of(contract, case)
    if inputs.target is None:
        return _of_teacher(loss, inputs)
    squashed = _probabilities_as_logits(loss, inputs)
    if squashed is not None:
        return squashed
    if contract.target == "binary":
        return None
    start = loss.wide(inputs)
    if contract.expects == "log_probabilities":
        return _target_as_logarithm(loss, inputs, start) or _normalised_again(loss, inputs, start)
    if contract.expects == "probabilities":
        return _probabilities_as_logarithms(loss, inputs, start)
    chances = replace(inputs, outputs=(inputs.outputs[0].softmax(class_axis(contract)), *inputs.outputs[1:]))
    return _probabilities_as_logarithms(loss, chances, start) or _shifted(loss, inputs, start)


def _of_teacher(loss: Loss, inputs: Inputs) -> Seen | None:
    """The divergence of two outputs: of logits, and a first of them that is no logarithm."""
    if loss.contract.expects != "logits" or len(inputs.outputs) != 2:
        return None
    axis = class_axis(loss.contract)
    student, teacher = inputs.outputs
    start = loss.wide(inputs, grad=False)
    for output in (student.softmax(axis), student):
        wrong = float((teacher.softmax(axis) * (teacher.log_softmax(axis) - output)).sum())
        if _is_reduced(start.total, wrong, output, loss):
            return _no_logarithm(start)
    return None


def applies(loss_expects: str, target: str) -> bool:
    """Whether anything is known of such a contract."""
    return loss_expects in ("logits", "log_probabilities", "probabilities") and (
        target != "pair" or loss_expects == "logits"
    )


def _one_hot(loss: Loss, target: torch.Tensor, *, wrong: bool) -> torch.Tensor:
    """The answer that gives each target, or another class, all the probability."""
    contract, axis = loss.contract, class_axis(loss.contract)
    if contract.target == "binary":
        high = target == max(contract.labels)
        return (high != wrong).to(torch.float64)
    index = target if contract.target == "index" else target.argmax(axis)
    if wrong:
        index = (index + 1) % (contract.num_classes or 2)
    return torch.nn.functional.one_hot(index, contract.num_classes or 2).movedim(-1, axis).to(torch.float64)


def _probabilities_as_logits(loss: Loss, inputs: Inputs) -> Seen | None:
    contract, target = loss.contract, inputs.target
    if target is None or len(inputs.outputs) > 1:
        return None
    if contract.target == "distribution":  # one class a row, so that the exact values are those of indices
        target = _one_hot(loss, target, wrong=False)
    if contract.expects == "log_probabilities" or (contract.target == "binary" and tuple(contract.labels) != (0, 1)):
        return None
    seen: list[float] = []
    for wrong in (False, True):
        answer = _one_hot(loss, target, wrong=wrong)
        given = answer if contract.expects == "probabilities" else CONFIDENT * (2.0 * answer - 1.0)
        cost = _cost_of_one_hot(loss, answer, target)
        value = loss.wide(Inputs((given,), target), grad=False).total
        if not any(same(value, c, cost.sum().item()) for c in (cost.mean().item(), cost.sum().item())):
            return None
        seen.append(value)
    binary = contract.target == "binary"
    first = "sigmoid" if binary else "softmax"
    twice = contract.expects == "logits"
    return Seen(
        cause="probabilities_as_logits",
        summary=f"probabilities are taken for logits: a sure and right answer still costs {seen[0]:.4g}",
        measured=f"{seen[0]:.6g} for sure and right answers, {seen[1]:.6g} for sure and wrong ones",
        shown_by=(
            f"these are cross-entropy's values for the one-hot vector as logits, to {_digits()} digits"
            + (f": the logits go through a {first}, or another squashing, first" if twice else "")
        ),
    )


def _cost_of_one_hot(loss: Loss, answer: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What cross-entropy gives each target where a one-hot answer stands in place of logits."""
    functional, axis = torch.nn.functional, class_axis(loss.contract)
    if loss.contract.target == "binary":
        return functional.binary_cross_entropy_with_logits(answer, target, reduction="none")
    rows = answer.movedim(axis, -1).reshape(-1, answer.shape[axis])
    index = target if loss.contract.target == "index" else target.argmax(axis)
    return functional.cross_entropy(rows, index.reshape(-1), reduction="none")


def _shifts(inputs: Inputs, axis: int) -> torch.Tensor:
    """One number for each position, the same for all its classes."""
    shape = list(inputs.outputs[0].shape)
    shape[axis] = 1
    generator = torch.Generator().manual_seed(sum(shape))
    return 1.0 + torch.rand(shape, generator=generator, dtype=torch.float64)


def _moved(inputs: Inputs, by: torch.Tensor) -> Inputs:
    return replace(inputs, outputs=(inputs.outputs[0] + by, *inputs.outputs[1:]))


def _change(loss: Loss, inputs: Inputs, start: Answer, by: torch.Tensor) -> float:
    change = loss.wide(_moved(inputs, by), grad=False).total - start.total
    if not math.isfinite(change):
        raise CannotDecide("the value is not finite for shifted outputs")
    return change


def _shifted(loss: Loss, inputs: Inputs, start: Answer) -> Seen | None:
    if loss.contract.output_range != (-math.inf, math.inf):
        raise CannotDecide("a shift leaves LossContract.output_range: the logits are bounded")
    axis, size = class_axis(loss.contract), size_of(start, inputs)
    by = _shifts(inputs, axis)
    change = _change(loss, inputs, start, by)
    if same(change, 0.0, size):
        return None
    told = f"{change:+.4g} for a shift of all classes by 1 to 2; the value is {start.total:.4g}"
    constant = torch.ones_like(by)
    one, ten = (_change(loss, inputs, start, k * constant) for k in (1.0, 10.0))
    if same(ten, 10.0 * one, 10.0 * size) and one < 0 and not same(one, 0.0, size):
        return Seen(
            cause="linear_in_logits",
            summary=f"adding 10 to all logits lowers the loss by {-ten:.4g}: it is not normalised over the classes",
            measured=f"{one:+.6g} for a shift by 1, {ten:+.6g} for a shift by 10",
            shown_by="the change is exactly proportional to the shift, so the loss falls without bound",
        )
    other = next(_axes_without_change(loss, inputs, start, axis), None)
    if other is not None:
        return Seen(
            cause="wrong_axis",
            summary=f"the loss is normalised over axis {other}, and the classes lie on axis {axis}",
            measured=told,
            shown_by=f"a number added along axis {other} changes nothing, one added along axis {axis} does",
        )
    if _per_class(loss, inputs, start):
        return None
    return Seen(
        cause="not_invariant",
        summary="adding a number to all logits of a row changes the loss",
        measured=told,
        shown_by="classes are not judged one by one either, as one-against-all losses do",
    )


def _axes_without_change(loss: Loss, inputs: Inputs, start: Answer, axis: int) -> Iterator[int]:
    for other, length in enumerate(inputs.outputs[0].shape):
        if other != axis and length > 1:
            change = _change(loss, inputs, start, _shifts(inputs, other))
            if same(change, 0.0, size_of(start, inputs)):
                yield other


def _per_class(loss: Loss, inputs: Inputs, start: Answer) -> bool:
    """Whether two classes of one position add up: no second difference between them."""
    axis = class_axis(loss.contract)
    at = [torch.zeros_like(inputs.outputs[0]) for _ in (0, 1)]
    for c, step in enumerate(at):
        step.movedim(axis, -1)[..., c] = 0.5
    one, other, both = (_change(loss, inputs, start, by) for by in (at[0], at[1], at[0] + at[1]))
    return same(both, one + other, size_of(start, inputs) + abs(both))


def _normalised_again(loss: Loss, inputs: Inputs, start: Answer) -> Seen | None:
    change = _change(loss, inputs, start, _shifts(inputs, class_axis(loss.contract)))
    if not same(change, 0.0, size_of(start, inputs)):
        return None
    return Seen(
        cause="normalised_again",
        summary="log-probabilities are normalised once more, which changes nothing",
        measured=f"{change:+.2g} for a shift of all classes by 1 to 2",
        shown_by="a shift of the output changes nothing, as only logits allow",
    )


def _target_as_logarithm(loss: Loss, inputs: Inputs, start: Answer) -> Seen | None:
    output, target = inputs.outputs[0], inputs.target
    if loss.contract.target != "distribution" or target is None:
        return None
    wrong = float((target.exp() * (target - output)).sum())
    if not _is_reduced(start.total, wrong, output, loss):
        return None
    return Seen(
        cause="target_as_logarithm",
        summary="target probabilities are taken for their logarithms",
        measured=f"the value is {start.total:.6g}, that of a divergence with log_target=True",
        shown_by=f"the sum of exp(t) (t - log p) over the classes, to {_digits()} digits",
    )


def _probabilities_as_logarithms(loss: Loss, inputs: Inputs, start: Answer) -> Seen | None:
    output, target = inputs.outputs[0], inputs.target
    if target is None:
        return None
    if loss.contract.target == "distribution":
        wrong = float((target * (target.log() - output)).sum())
        return _no_logarithm(start) if _is_reduced(start.total, wrong, output, loss) else None
    picked = -float(output.movedim(class_axis(loss.contract), -1).gather(-1, target[..., None]).sum())
    if not _is_reduced(start.total, picked, output, loss):
        return None
    return Seen(
        cause="linear_in_probabilities",
        summary="the loss is minus the probability of the right class, not its logarithm",
        measured=f"the value is {start.total:.6g}",
        shown_by=f"minus the probabilities of the targets, to {_digits()} digits",
    )


def _no_logarithm(start: Answer) -> Seen:
    return Seen(
        cause="probabilities_as_logarithms",
        summary="what is no logarithm is taken for one: the divergence can be negative",
        measured=f"the value is {start.total:.6g}",
        shown_by=f"the sum of t (log t - p) over the classes, to {_digits()} digits",
    )


def _is_reduced(value: float, total: float, output: torch.Tensor, loss: Loss) -> bool:
    """Whether a value is this sum, or its mean over entries, positions or rows."""
    entries, rows = output.numel(), output.shape[0]
    counts = {1, entries, rows, entries // output.shape[class_axis(loss.contract)]}
    return any(same(value * n, total, abs(total) + 1.0) for n in counts)


def _digits() -> int:
    return 8
