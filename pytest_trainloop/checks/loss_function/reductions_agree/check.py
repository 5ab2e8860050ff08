"""The reductions none, sum and mean agree, and the order of the rows does not matter.

What it does
    It puts the rows in a different order, and calls the criterion with each reduction, where it has a ``reduction``
    keyword or attribute.

Why is this bad?
    A sum in place of a mean multiplies the step by the batch size; a keyword that is not read, or a mean of
    means, gives gradients that depend on how a batch was split.

How it decides
    1. Rows are examples. Reordered together with their targets they give the same value, in float64.
    2. The result of sum is the sum of the entries of none.
    3. The divisor of the mean may depend on the targets (their count, their weights). So sum / mean must be equal for
       two outputs under one target.
    4. A criterion without ``reduction`` is a sum if twice the rows give twice the value and two halves add up to the
       whole. It is a mean if twice the rows give the same value. ``LossContract.reduction`` must say so. Where the
       contract says nothing, it is advice.

    | seen                                        | cause                  | advice if           |
    |---------------------------------------------|------------------------|---------------------|
    | a different order of rows changes the value | ``order_matters``      |                     |
    | all reductions give one number              | ``reduction_ignored``  |                     |
    | none gives one number                       | ``none_is_reduced``    |                     |
    | sum is not the sum of none                  | ``sum_is_not_the_sum`` |                     |
    | sum / mean differs between two outputs      | ``mean_is_no_mean``    | always              |
    | the value is a sum and a mean is wanted     | ``mean_is_a_sum``      | nothing is declared |
    | the value is a mean and the sum is declared | ``sum_is_a_mean``      |                     |
    | several numbers come back                   | ``not_reduced``        | nothing is declared |

When it is skipped
    It skips values that are not finite, and criteria that draw random numbers.

Faulty
    >>> def loss(output, target, reduction="mean"):
    ...     each = F.l1_loss(output, target, reduction="none")
    ...     return each.sum() if reduction == "none" else each.mean() if reduction == "mean" else each.sum() / 2
    >>> contract = LossContract(criterion=loss, expects="values", target="value")

Fixed
    >>> def loss(output, target, reduction="mean"):
    ...     each = F.l1_loss(output, target, reduction="none")
    ...     return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()
    >>> contract = LossContract(criterion=loss, expects="values", target="value")

Known limits
    A loss over time gives time its own axis with ``shape=``; rows that are steps of one sequence have an order.
    Losses that draw random numbers are skipped.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.nll_loss.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.losses.evidence import LossEvidence

CAUSES = {
    "order_matters": Cause(
        proof="outputs and targets were reordered together, and the value changed",
        repair="judge each row alone, or give the ordered axis to shape=",
    ),
    "reduction_ignored": Cause(
        proof="none, sum and mean give the same number, which doubles with the rows",
        repair="return loss, loss.sum() or loss.mean() as reduction says",
    ),
    "none_is_reduced": Cause(
        proof="one number is returned for several rows under reduction none",
        repair="return one number for each row under reduction='none'",
    ),
    "not_reduced": Cause(
        proof="several numbers are returned where the contract says mean or sum",
        repair="reduce it, or say reduction='none' in the contract",
        settle="LossContract(reduction=...) says which one it is, and other values are then a fault",
    ),
    "sum_is_not_the_sum": Cause(
        proof="the entries under none add up to something other than the sum",
        repair="return the entries of none, summed",
    ),
    "mean_is_a_sum": Cause(
        proof="twice the rows give twice the value under mean, and its parts add up to the whole",
        repair="divide by the number of rows, or say reduction='sum' in the contract",
        settle="LossContract(reduction=...) says which one it is, and other values are then a fault",
    ),
    "sum_is_a_mean": Cause(
        proof="twice the rows give the same value under sum, and the whole is the mean of its parts",
        repair="do not divide, or say reduction='mean' in the contract",
        settle="LossContract(reduction=...) says which one it is, and other values are then a fault",
    ),
    "mean_is_no_mean": Cause(
        proof="sum / mean differs between two outputs under the same targets",
        repair="divide by a count or by the weights of the targets; if this normaliser is intended, skip it",
    ),
}


@check(causes=CAUSES, rank=50, subject="loss")
def reductions_agree(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.reductions_agree.property import reduction_error

    contract = evidence.contract
    least = max(4 if contract.expects == "embeddings" else 2, 2 * contract.min_rows)
    yield from evidence.violations(reduction_error, only=("ordinary",), least_rows=least)
