"""The right answer costs no more than a wrong one, and the target counts.

What it does
    It gives the criterion the right answer, and the same answer for another class of one row.

Why is this bad?
    A flipped sign, labels that count from 1, classes in another order than the head's, a target that is never read:
    the loss is finite and falls.

How it decides
    The wrong answer is the right one with its classes changed round, so that both are equally sure: label
    smoothing, focal weights, class weights, temperatures and margins treat them alike, and only the target tells
    them apart. A loss that grows with what is wrong then gives the right one no more. Distributions are turned
    round the same way; pairs of embeddings are matching rows at right angles against rows of the next pair;
    labelled embeddings are clusters against clusters across classes, where turning all embeddings together changes
    nothing (no proxies). Values may lie on another scale than targets (a log-rate), so there only a loss that falls
    in both directions away from the target, at all of three distances, is a fault; and an output of (rows, 1) that
    meets every target.

Faulty
    >>> def loss(output, target):
    ...     return F.log_softmax(output, -1).gather(-1, target[:, None]).mean()          # the minus is lost
    >>> contract = LossContract(criterion=loss, expects="logits", num_classes=3)

Fixed
    >>> def loss(output, target):
    ...     return -F.log_softmax(output, -1).gather(-1, target[:, None]).mean()
    >>> contract = LossContract(criterion=loss, expects="logits", num_classes=3)

Known limits
    A target that names a class it is not (complementary labels, unlearning) is reversed on purpose: skip it with
    that reason. Two embeddings with a label or a value are not judged: whether a high one says near is not known.

References
    https://docs.pytorch.org/docs/stable/nn.html#loss-functions
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.losses.evidence import LossEvidence

CAUSES = {
    "reversed": "every wrong answer of the same confidence costs less than the right one",
    "other_class": "one wrong answer costs less than the right one, and another does not",
    "target_unused": "in every example the value is the same for all targets that were given with one output",
    "rows_not_matched": "the value is exactly the mean over all pairs of an output and a target",
}

_REPAIRS = {
    "reversed": "correct the sign, or what the target says",
    "other_class": "count classes from 0, and in the order of the model's head",
    "target_unused": "use the target: gather with it, or compare the output with it",
    "rows_not_matched": "output.squeeze(-1), or target[:, None], so that both have one shape",
}


@check(causes=CAUSES, rank=70, subject="loss")
def correct_answer_has_lowest_loss(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.correct_answer_has_lowest_loss import property as answers
    from pytest_trainloop.strategies import cases

    for f in evidence.find(cases(evidence.contract, only=("ordinary",)), answers.look):
        if f.seen.cause == "target_unused" and f.times < f.of:
            continue  # flat there: a loss may be cut off far from the target
        yield evidence.finding(f, _REPAIRS[f.seen.cause])
