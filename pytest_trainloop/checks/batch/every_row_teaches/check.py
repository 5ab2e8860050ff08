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
    Rows left out: with any other rows in their place, losses, gradients and weights are the same, bit for bit, in
    float64, with the loop's own random numbers and at moved weights. All torch calls up to the step are then compared.
    Nothing is reported if rows end by their values (a mask, a clamp, a hardest example, a computed index), or are only
    looked at without gradients (held out). It is a fault if rows of a batch of any size are left out, or all beyond a
    constant number. Advice: too many rows for parts of one size, every other row, a constant share in front of the
    model (the part of one process), rows that change the statistics of a batch norm only.
    A class that costs a constant: on rows with 0 alone the loss is not 0, it is equal bit for bit at three states of
    the weights, and every gradient is exactly 0. Each row costs the same before the reduction, more than 0 (a masked
    row costs 0). Rows with 1 have gradients.
    One input for two: the model makes two equal calls with one tensor of the batch, with gradients, and the same layers
    follow both (different layers are two heads on one trunk). Nothing reads another tensor of that shape, dtype and
    kind (no mask, no positions). With dropout it is advice: an input may pass twice for two views of it.
    One target for all: the rows of a tensor differ, a constant index reads one row only, and that row meets a result of
    the model with all rows in one call.
    Flags as indices: whole numbers of the batch, one a row and never other than 0 and 1, index what has these rows, in
    the loss of several steps. At least once a position that is pointed at points elsewhere: places of partners (the
    anchor of each view) point at rows that point at themselves.
    Weights cut to zero: an integer division or a cast makes some weights of classes 0 (picked by labels, or given as
    ``weight=``), and they are not 0 with their fractions kept.
    A loss that is always exactly 0, without any gradient, under five seeds: it is followed back to the call that made 0
    of something else. A gradient must arrive with the clamp left out, the weights divided as fractions, or the target
    moved. A clamp must also cut its input where all inputs are equal, so that no model could tell them apart: a correct
    margin costs something there. All else (a reward of 0, a ramp that begins at 0) is a skip.

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
