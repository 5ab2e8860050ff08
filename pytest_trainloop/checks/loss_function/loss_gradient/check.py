"""The gradient of a loss is the slope of its value.

What it does
    It compares autograd's gradient with central differences of the value along random directions, in float64.

Why is this bad?
    A backward pass written by hand, an ``item()`` or ``argmax`` on the way: the value looks right, and the weights
    are moved by something else.

How it decides
    A central difference of step h is off by h squared (truncation) and eps / h (rounding), both 4e-11 of the slope
    at the step that makes them alike, for a smooth loss. Differences with two step sizes must agree to 1e-4, or
    there is a kink, and the point says nothing; slope and gradient then differ where they do by more than 1e-3. No
    gradient at all while the value depends on the output is a cut graph. A backward pass of its own
    (``torch.autograd.Function``) whose gradient lies elsewhere is wrong; one that gives twice the loss the same
    gradient leaves out ``grad_output``. A gradient that is a fixed multiple of the slope may be reversed on
    purpose, and a part without history (a focal weight, a teacher) may be meant: advice. A value that is flat where
    a gradient is given is a straight-through estimator, and is left alone.

Faulty
    >>> class SquaredError(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, output, target):
    ...         ctx.save_for_backward(output, target)
    ...         return ((output - target) ** 2).sum()
    ...     @staticmethod
    ...     def backward(ctx, grad_output):
    ...         output, target = ctx.saved_tensors
    ...         return grad_output * 2 * (output - target).abs(), None                   # the sign is lost
    >>> def loss(output, target):
    ...     return F.mse_loss(output, target) + 0.1 * SquaredError.apply(output, target) / len(output)
    >>> contract = LossContract(criterion=loss, expects="values", target="value")

Fixed
    >>> class SquaredError(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, output, target):
    ...         ctx.save_for_backward(output, target)
    ...         return ((output - target) ** 2).sum()
    ...     @staticmethod
    ...     def backward(ctx, grad_output):
    ...         output, target = ctx.saved_tensors
    ...         return grad_output * 2 * (output - target), None
    >>> def loss(output, target):
    ...     return F.mse_loss(output, target) + 0.1 * SquaredError.apply(output, target) / len(output)
    >>> contract = LossContract(criterion=loss, expects="values", target="value")

Known limits
    Gradients of the criterion's own parameters and of targets are not compared. A criterion that draws random
    numbers is skipped.

References
    https://docs.pytorch.org/docs/stable/generated/torch.autograd.gradcheck.gradcheck.html
    https://docs.pytorch.org/docs/stable/notes/extending.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.losses.evidence import LossEvidence

CAUSES = {
    "graph_cut": "the value changes with the output, or has no history, and autograd gives nothing or zeros",
    "wrong_backward": "a backward pass of its own takes part, and its gradient is not the slope of the value",
    "grad_output_ignored": "the gradient of twice the loss is the gradient of the loss, bit for bit",
    "scaled_backward": "a backward pass of its own gives a fixed multiple of the slope, along every direction",
    "part_detached": "the gradient is not that of the whole value, and only operations of torch take part",
}

_REPAIRS = {
    "graph_cut": "keep the tensor on the way: no item(), numpy(), detach(), argmax, round or torch.tensor(loss)",
    "wrong_backward": "correct backward(), and test it with torch.autograd.gradcheck in float64",
    "grad_output_ignored": "multiply what backward() returns by grad_output: loss scaling and sums of losses need it",
    "scaled_backward": "if the factor is not meant, correct backward(); if it is, skip it with that reason",
    "part_detached": "if the part is meant to have no gradient, skip it with that reason; else leave out detach()",
}


@check(causes=CAUSES, rank=30, subject="loss")
def loss_gradient(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.loss_gradient import property as slope
    from pytest_trainloop.strategies import cases

    for f in evidence.find(cases(evidence.contract, only=("ordinary",), most_rows=4), slope.look):
        yield evidence.finding(f, _REPAIRS[f.seen.cause], level="advice" if f.seen.cause in _MAY_BE_MEANT else "fault")


_MAY_BE_MEANT = ("scaled_backward", "part_detached")
