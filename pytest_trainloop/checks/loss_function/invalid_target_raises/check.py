"""A target of the wrong shape, dtype or range raises, and is not taken silently.

What it does
    It gives the criterion an output of (rows, 1) with a target of (rows,), targets for fewer rows, a class that
    does not exist, and class indices as floats.

Why is this bad?
    (64, 1) against (64,) broadcasts to 64 x 64 differences: the model learns the mean of the targets, and the loss
    falls. It is the commonest silent fault of losses written by hand.

How it decides
    A loss that takes the column silently is named where its value is exactly that of every output with every target,
    and not that of each with its own (a loss that flattens first is right). An exception or a warning is enough: most
    of torch's own losses warn. What is not checked gives no wrong loss by itself, as long as every caller gives the
    right shapes: all of it is advice (``loss_contract`` fails the loop that broadcasts).

Faulty
    >>> def huber(output, target):
    ...     away = (output - target).abs()
    ...     return torch.where(away < 1, 0.5 * away**2, away - 0.5).mean()
    >>> contract = LossContract(criterion=huber, expects="values", target="value")

Fixed
    >>> def huber(output, target):
    ...     if output.shape != target.shape:
    ...         raise ValueError(f"output {output.shape} against target {target.shape}")
    ...     away = (output - target).abs()
    ...     return torch.where(away < 1, 0.5 * away**2, away - 0.5).mean()
    >>> contract = LossContract(criterion=huber, expects="values", target="value")

Known limits
    Distributions that do not sum to 1 and binary targets outside [0, 1] are taken by torch's own losses, and are
    not tried. Nothing is known of pairs and embeddings.

References
    https://docs.pytorch.org/docs/stable/notes/broadcasting.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.losses.evidence import LossEvidence

CAUSES = {
    "broadcasts": "the value for (rows, 1) against (rows,) is exactly that of every output with every target",
    "rows_unchecked": "fewer targets than rows are taken without an exception or a warning",
    "range_unchecked": "a class that does not exist is taken without an exception or a warning",
    "dtype_unchecked": "class indices as floats are taken without an exception or a warning",
}

_REPAIRS = {
    "broadcasts": "raise where output.shape != target.shape; or flatten both first",
    "rows_unchecked": "raise where len(output) != len(target): gather takes fewer rows silently",
    "range_unchecked": "use cross_entropy or nll_loss, which raise; an index of -1 is the last class",
    "dtype_unchecked": "raise where target.is_floating_point()",
}


@check(causes=CAUSES, rank=80, subject="loss")
def invalid_target_raises(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.invalid_target_raises import property as refusals
    from pytest_trainloop.strategies import cases

    for f in evidence.find(cases(evidence.contract, only=("ordinary",)), refusals.look):
        yield evidence.finding(f, _REPAIRS[f.seen.cause], level="advice")
