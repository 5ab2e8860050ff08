"""A loss in single and half precision agrees with float64, as far as rounding explains.

What it does
    It calls the criterion in float32, bfloat16 and float16, and in float64 with the same numbers.

Why is this bad?
    An eps of 1e-8 is 0 in float16, and an exponential of 12 is infinite there: under autocast or in pure bfloat16 the
    loss is NaN, or far from its value in float32.

How it decides
    1. Inputs are rounded to the precision first and then widened. So both calls get the same numbers.
    2. Let u be half the distance from 1 to the next number. Each operation rounds by at most u M, with M the largest of
       all results.
    3. There are n roundings: eight for each kernel (the longest of torch's fused losses) and one for each entry of a
       sum.
    4. P is the change of the value when every input is rounded by u.
    5. The bound is n (u M + P), the forward error of a stable loss, whatever the order of its operations. A larger
       error is a fault: ``loses_digits``.
    6. A non-finite result is a fault if the precision can represent it and every intermediate number, as float64 shows
       them: ``not_finite``.
    7. If an intermediate number is too large, every way to compute the loss may meet it: advice, ``out_of_range``.
    8. Losses of torch itself get advice.
    9. A precision without such an operation, or in which the criterion raises, is left out.

When it is skipped
    It skips a criterion that draws random numbers.

Faulty
    >>> def loss(output, target):
    ...     p = (8 * output).sigmoid()
    ...     return -(target * (p + 1e-8).log() + (1 - target) * (1 - p + 1e-8).log()).mean()
    >>> contract = LossContract(criterion=loss, expects="logits", target="binary", num_classes=2)

Fixed
    >>> def loss(output, target):
    ...     return F.binary_cross_entropy_with_logits(8 * output, target)
    >>> contract = LossContract(criterion=loss, expects="logits", target="binary", num_classes=2)

Known limits
    In bfloat16 the bound is wide: only non-finite results and errors in the first digits are found. Of gradients only
    non-finite ones are. Numbers inside fused kernels are not seen.

References
    https://docs.pytorch.org/docs/stable/amp.html
    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.losses.evidence import LossEvidence

CAUSES = {
    "not_finite": Cause(
        proof="the lower precision can represent all intermediate numbers, and the result is not finite",
        repair="compute the loss in float32 (output.float()), or use log_softmax and logsigmoid",
    ),
    "out_of_range": Cause(
        proof="the result can be represented and is not finite: an intermediate number is too large",
        repair="compute the loss in float32 (output.float()), as autocast does for torch's own losses",
        settle="LossContract(output_range=(low, high)) says which outputs come",
    ),
    "loses_digits": Cause(
        proof="the difference to float64 is larger than all roundings on the way explain",
        repair="compute the loss in float32 (output.float()), or rewrite what cancels: log1p, expm1, log_softmax",
    ),
}


@check(causes=CAUSES, rank=60, subject="loss")
def precisions_agree(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.precisions_agree.property import precision_error

    found = list(evidence.violations(precision_error, only=("ordinary",)))
    yield from [finding for finding in found if finding.cause == "not_finite"] or found
