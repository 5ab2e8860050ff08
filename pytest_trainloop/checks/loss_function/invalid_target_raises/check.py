"""A target of the wrong shape, dtype or range raises, and is not accepted silently.

What it does
    It gives the criterion an output of (rows, 1) with a target of (rows,), targets for fewer rows, a class that
    does not exist, and class indices as floats.

Why is this bad?
    (64, 1) against (64,) broadcasts to 64 x 64 differences: the model learns the mean of the targets, and the loss
    falls. It is the most frequent silent fault of custom losses.

How it decides
    1. An exception or a warning is enough: most of torch's own losses warn.
    2. A missing test gives no wrong loss as long as every caller gives the right shapes. So every finding is advice
       (``loss_contract`` fails the loop that broadcasts).

    | accepted without exception or warning | cause |
    |---|---|
    | ``(rows, 1)`` against ``(rows,)``, with exactly the value of every output with every target | ``broadcasts`` |
    | fewer targets than rows | ``rows_unchecked`` |
    | a class that does not exist | ``range_unchecked`` |
    | class indices as floats | ``dtype_unchecked`` |

    A loss that flattens both first, and so compares each output with its own target, is correct.

When it is skipped
    It skips contracts of which no invalid target is known, and values with more than one axis.

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
    Distributions that do not sum to 1 and binary targets outside [0, 1] are accepted by torch's own losses, and are not
    tried. Pairs and embeddings are not judged.

References
    https://docs.pytorch.org/docs/stable/notes/broadcasting.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.losses.evidence import LossEvidence

CAUSES = {
    "broadcasts": Cause(
        proof="the value for (rows, 1) against (rows,) is exactly that of every output with every target",
        repair="raise where output.shape != target.shape; or flatten both first",
    ),
    "rows_unchecked": Cause(
        proof="fewer targets than rows are accepted without an exception or a warning",
        repair="raise where len(output) != len(target): gather accepts fewer rows silently",
    ),
    "range_unchecked": Cause(
        proof="a class that does not exist is accepted without an exception or a warning",
        repair="use cross_entropy or nll_loss, which raise; an index of -1 is the last class",
    ),
    "dtype_unchecked": Cause(
        proof="class indices as floats are accepted without an exception or a warning",
        repair="raise where target.is_floating_point()",
    ),
}


@check(causes=CAUSES, rank=80, subject="loss")
def invalid_target_raises(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.invalid_target_raises.property import accepted_invalid_target

    yield from evidence.violations(accepted_invalid_target, only=("ordinary",))
