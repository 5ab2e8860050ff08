"""An output of the model depends on its own row of the batch only, and is compared with that row's label.

What it does
    It makes one forward pass over a few rows of the example batch, the model in evaluation mode. It takes the gradient
    of single output rows with respect to all data that enters: floating inputs, and what embeddings look up. Then it
    makes the first step several times: as it is, and with other values in some rows.

Why is this bad?
    A softmax over the rows, a recurrent net that runs over them, a ``view`` in place of a ``transpose``: shapes fit and
    the loss falls, while each example sees its neighbours in the batch. Scores then depend on how batches are composed,
    and are wrong where the model gets one example.

How it decides
    In the model: the gradient of output row i with respect to input row j is exactly 0 for i other than j, in every
    kernel and every order of summation, since products with zero rows give zeros. There is no tolerance. Batch norms
    with running statistics keep rows apart; those without are a fault where rows_interact=False is declared. The number
    of rows is one that no other axis has, and all weights are moved a little first: a layer that starts at zero passes
    nothing on.

    Rows may interact on purpose (graphs, points, prototypes, attention over the batch, statistics of a minibatch). So a
    cause is named only where one operation done another way keeps all rows apart: the softmax or the norm along another
    axis, a transpose in place of the view, ``batch_first`` flipped, statistics as constants where they scale or shift a
    row on its own way to the outputs. The rows of such statistics may be part of a longer axis, as the nodes of all
    graphs. Data that is standardised by its batch is advice, and a fault where rows_interact=False is declared. The
    batch must show that its first axis holds rows: something must have one entry for each row and none for each
    position, or a ``DataLoader`` that shuffles stacks its items there. All else is advice, or a skip where products of
    rows interact, that says how to declare it.

    In the loss: a row's share is the gradient of what the loop backpropagates with respect to what entered the model of
    this row. Two rows get other values. In a sum of losses of rows the shares of all other rows stay as they are, or
    are scaled by one number (a count). Where they do not, the fault is named by an identity or by a repair that was
    tried:

    - the targets of all rows change places and no share changes, each target adds its part to the share of every row,
      and no input does: each output is compared with the targets of all rows;
    - the target of one row changes the share of a row that it does not enter, in no fixed order. A constant number of
      rows is intended (the next row as target, another row as negative); where rows are mixed (mixup), the target must
      change the shares of those rows that its input is mixed into;
    - (N, 1) and (N,) make a table of all pairs that is only summed, and the rows of one side may change places;
    - weights by row may change places, while their sum scales all shares;
    - with a softmax, a normalisation, a similarity, a running sum or a view along another axis all shares are apart;
    - with copies of rows in the other layout they are: ``repeat_interleave`` in place of ``repeat``, or halves in place
      of every second row of what ``cat`` joined. As many copies as rows are all pairs, on purpose.

    Other shares that depend on other rows (contrastive losses, statistics, ranks, advantages) are no fault, unless
    rows_interact=False is declared. Where ordered=False is declared, rows that all change places together must not
    change the loss. Where nothing is declared, a changed loss is advice for a running sum over outputs: risk sets need
    rows that are sorted. Where rows_interact=True is declared, and numbers in the batch group neighbouring rows in
    groups of several sizes, whole groups that change places must not change the loss, unless ordered=True is declared.

Faulty
    >>> def forward(self, x):
    ...     return self.head(torch.nn.functional.normalize(self.encoder(x), dim=0))

Fixed
    >>> def forward(self, x):
    ...     return self.head(torch.nn.functional.normalize(self.encoder(x), dim=1))

Known limits
    Outputs with two axes of rows (all pairs), or with another number of rows than the batch, are not judged. Shares are
    taken where data enters a module as a floating tensor or by an embedding. A statistic that scales all shares by one
    number (a root of the mean square, a product of two means) is taken for a count. A weight that depends on the place
    of a row in the batch, and not on other rows, is found with ``ordered=False`` only. ``rows_interact=True`` declares
    that rows interact on purpose, ``rows_interact=False`` that they must not, whatever the operation.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html (batch_first)
    https://karpathy.github.io/2019/04/25/recipe/ (use backprop to chart dependencies)
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.batch_independence.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
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
        ordered = list(rules.order_of_rows(evidence, met))
        if not ordered:
            raise DoesNotApply("rows_interact=True declares that rows interact on purpose")
        yield from ordered
        return
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
