"""Every row of the batch that costs something teaches something.

What it does
    It makes one step of the loop on the batch, and again with another row in the place of the last one, and of the
    first. If each row has a label of 0 or 1, it makes a step on rows with 0 alone. It looks at the losses of the
    watched run.

Why is this bad?
    A slice left from debugging, a loop over rows that ends one too early, labels of 0 and 1 for a hinge that takes -1
    and 1, weights that an integer division makes 0: the loss falls, since the other rows teach, and a part of the data
    is read and paid for in vain.

How it decides
    1. It first looks for a loss that is exactly 0, without any gradient, under five seeds. The call that made 0 of
       something else is left out. If a gradient then arrives, that is the cause. A clamp must also cut if all inputs
       are equal: a correct margin costs something there. All other zero losses (a reward of 0, a ramp from 0) are
       skipped.
    2. It puts another row in the place of the last row, then of the first. If losses, gradients and weights stay equal,
       bit for bit, in float64, with the loop's own random numbers and at moved weights, the row is left out.
    3. All torch calls up to the step are then compared. Silent are rows that end by their values (a mask, a clamp, a
       hardest example, a computed index), and rows only looked at without gradients.
    4. Constant indices, flags and weights are read from these calls (docs/how-it-decides.md#rows-that-teach-nothing).

    | seen | cause | advice if |
    |---|---|---|
    | without a clamp a gradient arrives | ``hinge_never_active`` |  |
    | with fractions kept, weights made 0 by an integer division or cast are not 0 | ``weights_cut_to_zero`` |  |
    | the model makes two equal calls with one tensor; nothing reads a similar one | ``one_input_for_two`` | dropout |
    | rows differ, one is read by a constant index and meets all outputs | ``one_target_for_all_rows`` |  |
    | whole numbers, never other than 0 and 1, index rows in several steps | ``flags_as_indices`` |  |
    | rows of label 0 alone have a constant loss above 0 and gradient 0 | ``class_costs_a_constant`` |  |
    | rows are left out, in a batch of any size or beyond a number | ``rows_left_out`` | the next paragraph |

    ``one_input_for_two`` needs one pair of layers after both calls, and no other tensor of that shape, dtype and kind.
    ``rows_left_out`` is advice for a remainder of equal parts, every other row, a share cut in front of the model, and
    rows that only change batch norm statistics. A constant class needs equal losses at three states of the weights,
    each row above 0 before the reduction, and gradients for rows with 1.

When it is skipped
    It skips a batch whose rows may be positions (declare ``batch_dim=``), and loops that raise on its rows.

Faulty
    >>> for x, y in batches:
    ...     logits = model(x)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(logits[:-1], y[:-1]).backward()
    ...     optimizer.step()

Fixed
    >>> for x, y in batches:
    ...     logits = model(x)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(logits, y).backward()
    ...     optimizer.step()

Known limits
    Rows in the middle of the batch are not tried, nor rows that one term of the loss leaves out and another uses. What
    goes through python or numpy (``tolist()``) is not followed. Labels of more than two classes are not tried.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.HingeEmbeddingLoss.html (labels of -1 and 1)
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MarginRankingLoss.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.every_row_teaches.causes import CAUSES
from pytest_trainloop.core.errors import Refused
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=5)
def every_row_teaches(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.every_row_teaches import calls, losses, rows
    from pytest_trainloop.instruments.tracing.call_log import Calls

    if zero := list(losses.always_zero(evidence)):
        yield from zero
        return
    findings = [*losses.class_costs_a_constant(evidence), *calls.one_input_for_two(evidence)]
    seen, undecided = Calls(), None
    try:
        findings += rows.rows_left_out(evidence, seen)
    except Refused as reason:
        undecided = reason
    findings += calls.one_target_for_all_rows(evidence, seen)
    findings += calls.flags_as_indices(evidence, seen)
    findings += calls.weights_cut_to_zero(evidence, seen)
    yield from findings
    if undecided is not None and not findings:
        raise undecided
