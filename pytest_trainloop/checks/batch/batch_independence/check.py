"""An output of the model depends on its own row of the batch only, and is compared with that row's label.

What it does
    It makes one forward pass over a few rows of the example batch, the model in evaluation mode, and takes the gradient
    of single output rows with respect to everything that comes in: floating inputs, and what embeddings looked up. At
    the calls of loss functions it follows outputs and targets back to the rows of the batch that they come from.

Why is this bad?
    A softmax over the rows, a recurrent net that walks over them, a ``view`` where a ``transpose`` is meant: shapes fit
    and the loss falls, while each example is told what stands beside it. Scores then depend on how batches are made up,
    and fall apart where the model is asked for one example.

How it decides
    The gradient of output row i with respect to input row j is exactly 0 for i other than j, in every kernel and every
    order of summation: products with zero rows give zeros. There is no tolerance. Outputs are judged, not the loss,
    so losses in which examples meet need no excuse; batch norms with running statistics keep rows apart. The number of
    rows is chosen so that no other axis is as long, and all weights are moved a little first, since nothing passes a
    layer that starts at zero.
    That rows meet may be meant (graphs, points, prototypes, attention over the batch, statistics of a minibatch).
    So a cause is named only where one thing done otherwise keeps all rows apart: the softmax or the norm along another
    axis, the transpose in place of the view, ``batch_first`` turned round, statistics taken as constants where what is
    divided or shifted by them is on a row's own way to the outputs (data that is standardised by its batch is advice).
    Whether the first axis are rows is asked of the batch: something must have one entry for each row and none for each
    position. All else is advice, or a skip where products of rows meet, that says how to declare it.
    A target is followed through views, casts and picks to the row that it was taken from, an output by its gradient.
    Where an output depends on one row only, and that is another, labels and outputs are out of order, unless all are
    moved on by one constant number of rows (the next row as target, another's as negative).

Faulty
    >>> def forward(self, x):
    ...     return self.head(torch.nn.functional.normalize(self.encoder(x), dim=0))

Fixed
    >>> def forward(self, x):
    ...     return self.head(torch.nn.functional.normalize(self.encoder(x), dim=1))

Known limits
    Outputs with two axes of rows (all pairs), or with other numbers of rows than the batch, are not judged. What leaks
    without a gradient (a running state, an argmax over the rows) is not seen. ``rows_interact=True`` says that rows
    are to meet, ``rows_interact=False`` that they must not, whatever lets them.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html (batch_first)
    https://karpathy.github.io/2019/04/25/recipe/ (use backprop to chart dependencies)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import ATTENTION, EXTREMES, PRODUCTS, SCATTERS
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.batch_independence.passes import Meeting
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio", "causality", "padding_invariance")

CAUSES = {
    "softmax_over_rows": "with the softmax along another axis no output depends on another row",
    "normalised_over_rows": "with the norm of each row alone, or its statistics as constants, none does",
    "view_mixes_rows": "with a transpose in place of the view none does",
    "rows_as_positions": "with batch_first turned round none does",
    "rows_interact": (
        "a gradient of one row's output arrives at another row: a fault where rows_interact=False is declared"
    ),
    "labels_of_other_rows": "outputs that depend on one row are compared with targets of others, in no fixed order",
}

_REPAIRS = {
    "softmax_over_rows": "take the softmax over the axis of classes or keys: softmax(x, dim=-1)",
    "normalised_over_rows": (
        "normalise each row by itself (dim=-1), or use a norm that keeps running statistics for evaluation"
    ),
    "view_mixes_rows": "use transpose or permute to swap axes: view and reshape only cut the numbers up anew",
    "rows_as_positions": "batch_first=True, or give the layer (positions, rows, features)",
    "rows_interact": "let each output depend on its own row, or declare rows_interact=True",
    "labels_of_other_rows": "bring outputs and targets into one order: put sorted rows back, transpose both or neither",
}

_MEANT = (PRODUCTS - {"linear"}) | ATTENTION | SCATTERS | EXTREMES | {"__matmul__", "baddbmm", "cdist", "median"}
"""Operations that join rows on purpose where nothing else is known: products of rows, sums over edges, pooling. A
linear layer takes each row by itself."""

_CAUSE_OF = {
    "softmax": "softmax_over_rows",
    "normalised": "normalised_over_rows",
    "views": "view_mixes_rows",
    "turned": "rows_as_positions",
}

_SHOWN = {
    "softmax": "with the softmax along another axis every such gradient is exactly 0",
    "normalised": "with each row normalised by itself, or by constants, every such gradient is exactly 0",
    "views": "with the axes swapped by a transpose every such gradient is exactly 0",
    "turned": "with batch_first turned round every such gradient is exactly 0",
}


@check(needs={"run"}, causes=CAUSES, rank=30)
def batch_independence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.batch_independence.passes import Rows

    declared = evidence.declared("rows_interact")
    if declared:
        raise CannotDecide("rows_interact=True says that rows are to meet")
    strangers = tuple(_strangers(evidence))
    if strangers:
        yield from strangers
        return
    found = Rows(evidence).meeting()
    if found is None or found.why == "batch_norm":
        return
    if found.why in _CAUSE_OF and found.told:
        yield _finding(found, _CAUSE_OF[found.why], _SHOWN[found.why])
    elif found.why == "data_normalised" and found.told and declared is None:
        yield replace(_finding(found, "normalised_over_rows", _SHOWN["normalised"]), level="advice", explains=())
    elif declared is False:
        yield _finding(found, "rows_interact", "rows_interact=False")
    elif not found.told:
        raise CannotDecide(
            f"entries of the batch's first axis meet in the model{_through(found)}, and whether these are rows or "
            "positions cannot be told: give batch_dim=0 if they are rows, axis=1 if the second axis holds them"
        )
    elif found.ops and found.ops[0].name not in _MEANT:
        yield replace(_finding(found, "rows_interact", "the gradient of single rows"), level="advice", explains=())
    else:
        raise CannotDecide(
            f"rows meet in the model{_through(found)}: declare rows_interact=True if they are to, "
            "rows_interact=False if not"
        )


def _strangers(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.batch_independence.label_rows import Partners

    partners = Partners(evidence)
    apart = partners.strangers()
    if apart:
        label, row = apart[0]
        yield Finding(
            cause="labels_of_other_rows",
            summary=f"{partners.loss} compares outputs with the labels of other rows",
            measured=(
                f"{len(apart)} of {len(partners.pairs)} outputs that were followed; the label of row {label} meets an "
                f"output that depends on row {row} alone"
            ),
            shown_by="the gradient of each output, and the rows of the batch that targets were taken from",
            culprits=(partners.loss,),
            where=partners.where,
            smallest=f"{partners.rows} rows",
            repair=_REPAIRS["labels_of_other_rows"],
            explains=CONSEQUENCES,
        )


def _through(found: Meeting) -> str:
    return f", through {found.ops[0].named} ({found.ops[0].place})" if found.ops else ""


def _finding(found: Meeting, cause: str, shown: str) -> Finding:
    op = found.ops[0] if found.ops else None
    what = {
        "softmax_over_rows": "a softmax runs over the rows of the batch, not over one row's classes or keys",
        "normalised_over_rows": "rows are normalised by each other, not each by itself",
        "view_mixes_rows": f"{op.name if op else 'a view'} to another order of axes mixes the rows of the batch",
        "rows_as_positions": f"{op.named if op else 'a layer'} takes the rows of the batch for positions in a sequence",
        "rows_interact": f"rows meet in the model, through {op.named if op else 'an unknown operation'}",
    }[cause]
    return Finding(
        cause=cause,
        summary=what,
        measured=f"in evaluation mode output row {found.output} has a gradient with respect to input row {found.input}",
        shown_by=shown,
        culprits=tuple(dict.fromkeys(o.named for o in found.ops)),
        where=str(op.place) if op else "",
        smallest=f"{found.rows} rows",
        repair=_REPAIRS[cause],
        explains=CONSEQUENCES,
    )
