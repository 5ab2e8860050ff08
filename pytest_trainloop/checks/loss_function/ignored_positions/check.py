"""Ignored positions change neither value nor gradient, and do not count in the mean.

What it does
    It changes the outputs at positions whose target is ``ignore_index``, and removes such positions.

Why is this bad?
    Padding that counts makes the loss depend on how long the other rows of a batch are, and trains the model to
    predict padding.

How it decides
    1. It compares values and gradients in float64.
    2. If only outputs at ignored positions change, the value must stay, and no gradient may reach them.
    3. If ignored rows are removed, the value must stay. With several positions in a row, one position of every row is
       removed.

    | seen                                                        | cause                   |
    |-------------------------------------------------------------|-------------------------|
    | the call raises with an ignored target, and not without one | ``raises``              |
    | item 2: the value changes                                   | ``not_ignored``         |
    | item 2: a gradient arrives                                  | ``gradient_at_ignored`` |
    | item 3: both values are in the ratio of the two counts      | ``counted_in_mean``     |
    | item 3: they are in a different ratio                       | ``removal_differs``     |

When it is skipped
    It skips a criterion that shifts targets against outputs inside.

Faulty
    >>> def loss(output, target):
    ...     each = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    ...     return (each * (target != -100)).mean()                             # divides by all rows
    >>> contract = LossContract(criterion=loss, expects="logits", num_classes=3, ignore_index=-100)

Fixed
    >>> def loss(output, target):
    ...     each = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    ...     return (each * (target != -100)).sum() / (target != -100).sum().clamp(min=1)
    >>> contract = LossContract(criterion=loss, expects="logits", num_classes=3, ignore_index=-100)

Known limits
    A criterion that shifts targets against outputs inside (a causal language model's) is skipped: give what it
    calls after the shift. A sum over targets that is divided by a number from elsewhere (all tokens of an
    accumulated step) looks like one that counts them: skip it with that reason.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.losses.evidence import LossEvidence

CAUSES = {
    "raises": Cause(
        proof="the call raises with an ignored target, and does not without one",
        repair="give an index that exists in place of the ignored one (clamp, masked_fill), and mask the loss",
    ),
    "not_ignored": Cause(
        proof="only outputs at ignored positions were changed, and the value changed",
        repair="mask by target != ignore_index, and let the contract and the criterion name the same index",
    ),
    "gradient_at_ignored": Cause(
        proof="a gradient reaches ignored positions, whose outputs do not change the value",
        repair="let backward() give 0 there",
        change=("own backward",),
    ),
    "counted_in_mean": Cause(
        proof="the values with and without the ignored targets are in the exact ratio of the two counts",
        repair="divide by (target != ignore_index).sum().clamp(min=1) in place of mean()",
    ),
    "removal_differs": Cause(
        proof="the value changes when the ignored targets are removed, and not in the ratio of the counts",
        repair="leave ignored positions out of every sum and every count of the loss",
    ),
}


@check(needs={"ignore_index"}, causes=CAUSES, rank=40, subject="loss")
def ignored_positions(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.ignored_positions.property import effect_of_ignored

    yield from evidence.violations(effect_of_ignored, only=("some_ignored",))
