"""An output of the model depends on its own row of the batch only, and is compared with that row's label.

What it does
    It makes one forward pass over a few rows of the example batch, with the model in evaluation mode. It takes the
    gradient of single output rows with respect to all inputs: float tensors and embedding outputs. Then it repeats the
    first training step, unchanged and with changed values in some rows.

Why is this bad?
    A softmax over the wrong axis, or a ``view`` for a ``transpose``, mixes examples. Shapes fit and the loss falls. But
    scores depend on how batches are composed, and they are wrong for a single example.

How it decides
    1. In the model: the gradient of output row i with respect to input row j must be exactly 0 for other rows. A
       product with zeros is exactly zero in every kernel, so no tolerance is needed. Weights are first moved a
       little, since nothing depends on inputs behind a layer of zeros.
    2. In the loss: a row's "share" is the gradient with respect to that row's model inputs. Two rows get other values.
       All other shares must stay the same, or all scale by one factor, within 1e3 eps
       (docs/how-it-decides.md#rows-that-meet-outside-of-the-model).
    3. Rows may interact on purpose. So a cause needs the experiment of its table row. Tried first are labels and
       copies, then sums over rows, the model, operations in the loss, and the order of rows.
    4. Intended are targets a constant number of rows away, and targets that reach just the rows that their input is
       mixed into (mixup). So are as many copies of the batch as it has rows (all pairs).
    5. The batch must prove that its first axis is the batch axis. Some tensor has an entry for each row and none for
       each position, or a shuffling ``DataLoader`` stacks the items.
    6. With ``rows_interact=False`` any other interaction is a fault, ``rows_interact``. With ``rows_interact=True``
       only ``labels_of_all_rows``, ``labels_of_other_rows`` and ``order_matters`` are judged.
    7. ``order_matters`` is a fault with ``ordered=False``, or if the model sorts its rows, or whole groups change
       places under ``rows_interact=True``. Without ``ordered=`` a running sum over rows is tried too, as advice.

    | what shows it | cause | advice if |
    |---|---|---|
    | swapping targets changes no share, and inputs change no other row's share | ``labels_of_all_rows`` |  |
    | one target changes another row's share, in no fixed order | ``labels_of_other_rows`` |  |
    | copies of rows in the other layout make rows independent | ``copies_in_two_orders`` |  |
    | swapping row weights changes no share, and their sum scales all | ``weights_averaged`` |  |
    | (N, 1) and (N,) broadcast to N by N, and the order of one side does not matter | ``all_pairs_of_rows`` |  |
    | a softmax along another axis makes rows independent | ``softmax_over_rows`` |  |
    | a norm along another axis, or with constant statistics, makes rows independent | ``normalised_over_rows`` | of
      data, without ``rows_interact=`` |
    | a transpose in place of the view makes rows independent | ``view_mixes_rows`` |  |
    | the other ``batch_first``, or a table read along positions, makes rows independent | ``rows_as_positions``,
      ``positions_by_row`` |  |
    | in the model another operation lets rows interact; only a row's mask changes others | ``rows_interact``,
      ``mask_of_other_rows`` | without ``rows_interact=``; not by a count |
    | in the loss a similarity or running sum along another axis makes rows independent | ``similarity_over_rows``,
      ``cumulated_over_rows`` |  |
    | rows change places and the loss changes | ``order_matters`` | a running sum, without ``ordered=`` |

When it is skipped
    - No output has one axis of rows. Declare ``batch_dim=`` if rows are on another axis.
    - Something interacts, and it may be positions rather than rows. Declare ``batch_dim=``.
    - Rows interact by a product of rows, attention, a scatter or an extreme. Declare ``rows_interact=``.
    - ``rows_interact=True`` is declared, and item 6 finds nothing: the check does not apply.
    - ``fit`` raises on a few rows or on rows with other values, or gives NaN there.

Faulty
    >>> def forward(self, x):
    ...     return self.head(torch.nn.functional.normalize(self.encoder(x), dim=0))  # over the rows

Fixed
    >>> def forward(self, x):
    ...     return self.head(torch.nn.functional.normalize(self.encoder(x), dim=1))

Known limits
    Outputs with two axes of rows (all pairs), or with another number of rows than the batch, are not judged. Shares are
    taken where data enters a module as a float tensor or by an embedding. A statistic that scales all shares by one
    factor (a root of the mean square, a product of two means) is treated like the number of rows, so it is not found. A
    weight that depends on a row's place in the batch, and not on other rows, is found with ``ordered=False`` only.

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
    from pytest_trainloop.checks.batch.batch_independence.outputs import in_the_model, without_gradient
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
        yield from without_gradient(evidence)
        evidence.shared(RowInfluence.of).require_taken()
