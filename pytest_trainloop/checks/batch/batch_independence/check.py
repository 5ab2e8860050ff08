"""An output of the model depends on its own row of the batch only, and is compared with that row's label.

What it does
    It makes one forward pass over a few rows of the example batch, the model in evaluation mode, and takes the gradient
    of single output rows with respect to all data that enters: floating inputs, and what embeddings look up. At the
    calls of loss functions it follows outputs and targets back to the rows of the batch that they come from.

Why is this bad?
    A softmax over the rows, a recurrent net that runs over them, a ``view`` in place of a ``transpose``: shapes fit and
    the loss falls, while each example sees its neighbours in the batch. Scores then depend on how batches are composed,
    and are wrong where the model gets one example.

How it decides
    The gradient of output row i with respect to input row j is exactly 0 for i other than j, in every kernel and
    every order of summation: products with zero rows give zeros. There is no tolerance. Outputs are judged, not the
    loss, so losses in which examples interact are no exception; batch norms with running statistics keep rows apart,
    those without are a fault where rows_interact=False is declared. The number of rows is one that no other axis has,
    and all weights are moved a little first: a layer that starts at zero passes nothing on.
    Rows may interact on purpose (graphs, points, prototypes, attention over the batch, statistics of a minibatch). So a
    cause is named only where one operation done otherwise keeps all rows apart: the softmax or the norm along another
    axis, a transpose in place of the view, ``batch_first`` flipped, statistics as constants where they scale or shift a
    row on its own way to the outputs (data that is standardised by its batch is advice, and a fault where
    rows_interact=False is declared). The batch must show that its first axis holds rows: something must have one entry
    for each row and none for each position, or a ``DataLoader`` that shuffles stacks its items there. All else is
    advice, or a skip where products of rows interact, that says how to declare it.
    A target is followed through views, casts and indexing to the row that it was taken from, an output by its gradient.
    Where an output depends on one row only, and that is another, labels and outputs are out of order, unless all are
    shifted by one constant number of rows (the next row as target, another row as negative).
    What meets outside of the model is seen by shares. A row's share is the gradient of what the loop backpropagates
    with respect to what entered the model of this row. Two rows get other values: in a sum of losses of rows the shares
    of all others stay as they are, or are scaled by one number (a count). Where they do not, the fault is named by an
    identity or by a cure:

    - the targets of all rows change places and no share changes, each target adds its part to the share of every row,
      and no input does: each output is compared with the targets of all rows;
    - each target changes the share of one row, and that is another, in no fixed order;
    - (N, 1) beside (N,) makes a table of all pairs that is only summed, and one side's rows may change places;
    - weights by row may change places, while their sum scales all shares;
    - with a softmax, a normalisation, a similarity, a running sum or a view along another axis all shares are apart;
    - with copies of rows in the other layout they are: ``repeat_interleave`` in place of ``repeat``, or halves in place
      of every second row of what ``cat`` joined. As many copies as rows are all pairs, on purpose.

    What else lets shares interact (contrastive losses, statistics, ranks, advantages) is no fault, unless
    rows_interact=False is declared. Where ordered=False is, rows that all change places together must not change the
    loss either; where nothing is, that is advice for a running sum over what the model told of the rows: risk sets need
    them sorted.

Faulty
    >>> def forward(self, x):
    ...     return self.head(torch.nn.functional.normalize(self.encoder(x), dim=0))

Fixed
    >>> def forward(self, x):
    ...     return self.head(torch.nn.functional.normalize(self.encoder(x), dim=1))

Known limits
    Outputs with two axes of rows (all pairs), or with another number of rows than the batch, are not judged. Shares are
    taken where data enters a module as a floating tensor or by an embedding. A statistic that scales all shares alike
    (a root of the mean square, a product of two means) is taken for a count. ``rows_interact=True`` declares that rows
    interact on purpose, ``rows_interact=False`` that they must not, whatever the operation.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html (batch_first)
    https://karpathy.github.io/2019/04/25/recipe/ (use backprop to chart dependencies)
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.batch_independence.causes import CAUSES
from pytest_trainloop.errors import CannotDecide, DoesNotApply
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=30, steps=50)
def batch_independence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.batch_independence import rules
    from pytest_trainloop.checks.batch.batch_independence.outputs import in_the_model
    from pytest_trainloop.checks.batch.batch_independence.shares import RowShares

    declared = evidence.declared("rows_interact")
    met = evidence.shared(rules.meeting)
    if met is not None and (met.why in ("every", "permuted") or (met.why == "layout" and not declared)):
        yield rules.shrunk(evidence, met.finding, met.holds)
        return
    if declared:
        yield from rules.order_of_rows(evidence, met)
        raise DoesNotApply("rows_interact=True declares that rows interact on purpose")
    lost = itertools.chain(rules.averaged_weights(evidence), rules.all_pairs(evidence))
    for finding in lost:
        yield finding
        return
    try:
        inside = list(in_the_model(evidence))
    except CannotDecide:
        inside = []
        if met is None or met.why != "operation":
            # seen in the loss, whatever the model returns
            found = list(rules.order_of_rows(evidence, met)) if evidence.declared("ordered") is False else []
            if not found:
                raise
            yield from found
            return
    for finding in inside:
        yield finding if met is None else rules.shrunk(evidence, finding, None)
    if met is not None and not inside:
        yield from rules.of_operation(evidence, met)
    if inside or (met is not None and (met.why == "operation" or declared is False)):
        return
    ordered = list(rules.order_of_rows(evidence, met))
    yield from ordered
    if not ordered:
        evidence.shared(RowShares.of).require_taken()
