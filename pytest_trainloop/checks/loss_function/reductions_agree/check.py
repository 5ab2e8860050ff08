"""The reductions none, sum and mean agree, and the order of the rows does not matter.

What it does
    It puts the rows in another order, and asks for each reduction: by the criterion's ``reduction`` keyword or
    attribute, where it has one.

Why is this bad?
    A sum where a mean is meant multiplies the step by the batch size; a keyword that is not read, or a mean of
    means, gives gradients that depend on how a batch was cut.

How it decides
    In float64. Rows are examples: moved together with their targets they give the same value. The sum is the sum of
    what none gives. What the mean divides by may depend on the targets (their count, their weights), so sum / mean
    is asked to be the same for two outputs under one target; where it is not the normaliser may be meant: advice. A
    criterion without such a switch is a sum where twice the rows give twice the value and two halves add up to the
    whole, a mean where both give the same: that must be what ``LossContract.reduction`` says. Said by nobody, it is
    advice.

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

from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.losses.evidence import LossEvidence

CAUSES = {
    "order_matters": "outputs and targets were moved together, and the value changed",
    "reduction_ignored": "none, sum and mean give one and the same number, twice that for twice the rows",
    "none_is_reduced": "one number comes back for several rows under reduction none",
    "not_reduced": "several numbers come back where the contract says mean or sum",
    "sum_is_not_the_sum": "the entries under none add up to something other than the sum",
    "mean_is_a_sum": "twice the rows give twice the value under mean, and its parts add up to the whole",
    "sum_is_a_mean": "twice the rows give the same value under sum, and the whole is the mean of its parts",
    "mean_is_no_mean": "sum / mean differs between two outputs under the same targets",
}

_REPAIRS = {
    "order_matters": "judge each row by itself, or give the ordered axis to shape=",
    "reduction_ignored": "return loss, loss.sum() or loss.mean() as reduction says",
    "none_is_reduced": "return one number for each row under reduction='none'",
    "not_reduced": "reduce it, or say reduction='none' in the contract",
    "sum_is_not_the_sum": "return the entries of none, summed",
    "mean_is_a_sum": "divide by the number of rows, or say reduction='sum' in the contract",
    "sum_is_a_mean": "do not divide, or say reduction='mean' in the contract",
    "mean_is_no_mean": "divide by a count or by the weights of the targets; if this normaliser is meant, skip it",
}


@check(causes=CAUSES, rank=50, subject="loss")
def reductions_agree(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.reductions_agree import property as reductions
    from pytest_trainloop.strategies import cases

    contract = evidence.contract
    least = max(4 if contract.expects == "embeddings" else 2, 2 * contract.min_rows)
    for f in evidence.find(cases(contract, only=("ordinary",), least_rows=least), reductions.look):
        unsaid = (
            f.seen.cause in ("mean_is_a_sum", "not_reduced") and contract.reduction is None and not evidence.switches
        )
        advice = unsaid or f.seen.cause == "mean_is_no_mean"
        yield evidence.finding(f, _REPAIRS[f.seen.cause], level="advice" if advice else "fault")
