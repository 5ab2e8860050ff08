"""The gradient of a loss is the slope of its value.

What it does
    It compares autograd's gradient with central differences of the value along random directions, in float64.

Why is this bad?
    With a wrong custom backward pass, or an ``item()`` or ``argmax`` on the way, the value looks right and the weights
    follow something else.

How it decides
    1. A central difference of step h is off by h squared (truncation) and eps / h (rounding). For a smooth loss both
       are 4e-11 of the slope at the step that makes them equal.
    2. Differences with two step sizes must agree to 1e-4. Otherwise there is a kink, and the point is not judged.
    3. A gradient that differs from the slope by more than 1e-3 is an error.
    4. A constant value with a gradient is a straight-through estimator, and passes.

    | seen                                                           | cause                   | advice if |
    |----------------------------------------------------------------|-------------------------|-----------|
    | no gradient, and the value depends on the output               | ``graph_cut``           |           |
    | twice the loss has the same gradient, bit for bit              | ``grad_output_ignored`` |           |
    | a custom backward pass gives a different gradient              | ``wrong_backward``      |           |
    | it gives a fixed multiple of the slope (reversed on purpose)   | ``scaled_backward``     | always    |
    | no custom backward pass takes part (a focal weight, a teacher) | ``part_detached``       | always    |

When it is skipped
    It skips values that are not finite, a kink at every point, and criteria that draw random numbers.

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

from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.losses.evidence import LossEvidence

CAUSES = {
    "graph_cut": Cause(
        proof="the value changes with the output, or has no history, and autograd gives nothing or zeros",
        repair="keep the tensor on the way: no item(), numpy(), detach(), argmax, round or torch.tensor(loss)",
    ),
    "wrong_backward": Cause(
        proof="a custom backward pass takes part, and its gradient is not the slope of the value",
        repair="correct backward(), and test it with torch.autograd.gradcheck in float64",
        change=("own backward",),
    ),
    "grad_output_ignored": Cause(
        proof="the gradient of twice the loss is the gradient of the loss, bit for bit",
        repair="multiply what backward() returns by grad_output: loss scaling and sums of losses need it",
        change=("own backward",),
    ),
    "scaled_backward": Cause(
        proof="a custom backward pass gives a fixed multiple of the slope, along every direction",
        repair="if the factor is not intended, correct backward(); if it is, skip it with that reason",
        change=("own backward",),
    ),
    "part_detached": Cause(
        proof="the gradient is not that of the whole value, and no custom backward pass takes part",
        repair="if that part is to have no gradient, skip it with that reason; else leave out detach()",
    ),
}


@check(causes=CAUSES, rank=30, subject="loss")
def loss_gradient(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.loss_gradient.property import gradient_error

    yield from evidence.violations(gradient_error, only=("ordinary",), most_rows=4)
