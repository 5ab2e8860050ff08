"""An output of the model depends on its own row of the batch only, and is compared with that row's label.

What it does
    It makes one forward pass over a few rows of the example batch, the model in evaluation mode. It takes the gradient
    of single output rows with respect to all data that enters: floating inputs, and what embeddings look up. Then it
    makes the first step several times: unchanged, and with other values in some rows.

Why is this bad?
    A softmax over the rows, a recurrent net that runs over them, a ``view`` in place of a ``transpose``: shapes fit and
    the loss falls, while each example sees its neighbours in the batch. Scores then depend on how batches are composed,
    and are wrong where the model gets one example.

How it decides
    1. In the model: the gradient of output row i with respect to input row j must be exactly 0 for other rows. Products
       with zero rows are zeros in every kernel, so there is no tolerance. Weights are moved a little first.
    2. In the loss: a row's share is the gradient with respect to what entered the model of this row. Two rows get other
       values. The shares of the others must stay, or all scale by one number, to 1e3 eps
       (docs/how-it-decides.md#rows-that-meet-outside-of-the-model).
    3. Rows may interact on purpose. So a cause needs an identity, or one changed operation that keeps all rows
       separate. The table has the order: labels first, then the model, then operations in the loss.
    4. Intended are a target a constant number of rows away, a target that reaches just the rows which its input is
       mixed into (mixup), and as many copies as rows.
    5. The batch must show that its first axis holds rows. Something has one entry for each row and none for each
       position, or a shuffling ``DataLoader`` stacks the items.
    6. With ``rows_interact=False`` any other interaction is a fault, ``rows_interact``. With ``rows_interact=True``
       only labels, the order of whole groups, and rows that a model sorts are judged.
    7. It skips outputs without one axis of rows, gradients that are NaN, and products of rows until ``rows_interact=``
       is declared. It skips a proven operation if rows may be positions: declare ``batch_dim=``.

    | what shows it | cause | advice if |
    |---|---|---|
    | targets change places and no share changes; inputs change no other share | ``labels_of_all_rows`` |  |
    | one target changes another row's share, in no fixed order | ``labels_of_other_rows`` |  |
    | copies of rows in the other layout keep rows separate | ``copies_in_two_orders`` |  |
    | weights by row change places; their sum scales all shares | ``weights_averaged`` |  |
    | (N, 1) and (N,) make a table that is only summed; one side may change places | ``all_pairs_of_rows`` |  |
    | a softmax along another axis keeps rows separate | ``softmax_over_rows`` |  |
    | a norm along another axis, or with constant statistics, does | ``normalised_over_rows`` | data, undeclared |
    | a transpose in place of the view does; the other ``batch_first`` does | ``view_mixes_rows`` and another |  |
    | in the loss: a similarity or a running sum along another axis does | ``similarity_over_rows`` and another |  |
    | in the model: another operation lets rows interact | ``rows_interact`` | undeclared |
    | all rows, groups or sorted rows change places and the loss changes | ``order_matters`` | a running sum |

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
    from pytest_trainloop.checks.batch.batch_independence.row_influence import RowInfluence

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
            found = [finding for finding in rules.order_of_rows(evidence, met) if finding.level == "fault"]
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
        evidence.shared(RowInfluence.of).require_taken()
