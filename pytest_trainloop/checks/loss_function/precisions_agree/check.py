"""A loss in single and half precision agrees with float64, as far as rounding explains.

What it does
    It calls the criterion in float32, bfloat16 and float16, and in float64 with the very same numbers.

Why is this bad?
    An eps of 1e-8 is 0 in float16, an exponential of 12 is infinite there: under autocast or in pure bfloat16 the
    loss is NaN, or far from what float32 printed.

How it decides
    Inputs are rounded to the precision first and then widened, so both calls get the same numbers and the rounding
    of the inputs is no part of the difference. Let u be half the distance from 1 to the next number. Each operation
    rounds its result by u times its size, at most u M for M the largest of all results; n of them lie on the way:
    eight for each kernel (the longest of torch's fused losses) and one for each entry that a sum adds up. What
    rounding of every input by u changes in the value, P, says how much of a rounding is passed on. The bound is n
    (u M + P), the forward error of a loss that is stable, whatever the order of its operations. A result that is
    not finite is a fault where it and every number on the way to it can be represented in the precision, as float64
    shows them; where one on the way is too large, every way to compute it may meet such a number: advice. A
    precision for which torch has no such operation, or in which the criterion raises, is left out.

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
    In bfloat16 the bound is wide: only what is not finite or off in the first digits is seen. Gradients are looked
    at for being finite only. Sizes inside fused kernels are not seen.

References
    https://docs.pytorch.org/docs/stable/amp.html
    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.losses.evidence import LossEvidence

CAUSES = {
    "not_finite": "all numbers on the way can be represented in the lower precision, and the result is not finite",
    "out_of_range": "the result can be represented and is not finite: a number on the way to it is too large",
    "loses_digits": "the difference to float64 is more than all roundings on the way explain",
}

_REPAIRS = {
    "not_finite": "compute the loss in float32 (output.float()), or use log_softmax and logsigmoid",
    "out_of_range": "compute the loss in float32 (output.float()), as autocast does for torch's own losses",
    "loses_digits": "compute the loss in float32 (output.float()), or rewrite what cancels: log1p, expm1, log_softmax",
}


@check(causes=CAUSES, rank=60, subject="loss")
def precisions_agree(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.precisions_agree import property as halves
    from pytest_trainloop.strategies import cases

    found = evidence.find(cases(evidence.contract, only=("ordinary",)), halves.look)
    worst = [f for f in found if f.seen.cause == "not_finite"]
    for f in worst or found:
        advice = evidence.of_torch or f.seen.cause == "out_of_range"
        yield evidence.finding(f, _REPAIRS[f.seen.cause], level="advice" if advice else "fault")
