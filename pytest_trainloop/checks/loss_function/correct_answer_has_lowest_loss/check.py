"""The correct answer costs no more than a wrong one, and the target counts.

What it does
    It gives the criterion the correct answer, and the same answer with another class in one row.

Why is this bad?
    With a flipped sign, labels that count from 1, classes in a different order than the head's or a target that is
    never read, the loss is finite and falls.

How it decides
    1. The wrong answer is the correct one with its classes permuted, so both are equally confident. Label smoothing,
       focal weights, class weights, temperatures and margins treat them equally. Only the target separates them.
    2. A loss that grows with the error gives the correct answer no more than the wrong one.
    3. Distributions are permuted in the same way.
    4. For pairs of embeddings, matching orthogonal rows are compared with rows of the next pair.
    5. For labelled embeddings, clusters by class are compared with clusters across classes. A rotation of all
       embeddings must change nothing (no proxies).
    6. Values may lie on another scale than targets (a log-rate). So only two things are faults there. One is a loss
       that falls in both directions away from the target, at all of three distances. The other is an output of
       ``(rows, 1)`` that is compared with every target.

    | seen                                               | cause                |
    |----------------------------------------------------|----------------------|
    | the correct answer costs more than every wrong one | ``reversed``         |
    | only some wrong answers cost less                  | ``other_class``      |
    | the target changes nothing, in every example       | ``target_unused``    |
    | ``(rows, 1)`` is compared with every target        | ``rows_not_matched`` |

When it is skipped
    It skips values that are not finite, and labels of two embeddings: a high one may mean near or far.

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
    that reason. Two embeddings with a label or a value are not judged: a high label may mean near or far.

References
    https://docs.pytorch.org/docs/stable/nn.html#loss-functions
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.losses.evidence import LossEvidence

CAUSES = {
    "reversed": Cause(
        proof="every wrong answer of the same confidence costs less than the correct one",
        repair="correct the sign, or what the target says",
    ),
    "other_class": Cause(
        proof="one wrong answer costs less than the correct one, and another does not",
        repair="count classes from 0, and in the order of the model's head",
    ),
    "target_unused": Cause(
        proof="in every example the value is the same for all targets that were given with one output",
        repair="use the target: gather with it, or compare the output with it",
    ),
    "rows_not_matched": Cause(
        proof="the value is exactly the mean over all pairs of an output and a target",
        repair="output.squeeze(-1), or target[:, None], so that both have one shape",
    ),
}


@check(causes=CAUSES, rank=70, subject="loss")
def correct_answer_has_lowest_loss(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.correct_answer_has_lowest_loss.property import cheaper_wrong_answer

    # in some examples the value may be constant: a loss may be clipped far from the target
    yield from evidence.violations(cheaper_wrong_answer, only=("ordinary",), in_every_example=("target_unused",))
