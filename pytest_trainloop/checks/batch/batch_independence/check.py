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

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.batch_independence import findings_outside as outside
from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.errors import CannotDecide, DoesNotApply, Unreliable
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import ATTENTION, EXTREMES, PRODUCTS, RECURRENT, SCATTERS
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.batch_independence.label_rows import LabelRows
    from pytest_trainloop.checks.batch.batch_independence.meetings import Meeting
    from pytest_trainloop.checks.batch.batch_independence.passes import RowInteraction
    from pytest_trainloop.finding import Level
    from pytest_trainloop.runs.evidence import Evidence

EXPLAINS = (*LEARNING, "causality", "padding_invariance")

CAUSES = {
    "softmax_over_rows": Cause(
        proof="with the softmax along another axis no output depends on another row",
        repair="take the softmax over the axis of classes or keys: softmax(x, dim=-1)",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "normalised_over_rows": Cause(
        proof="with each row normalised alone, or its statistics as constants, no output depends on another row",
        repair="normalise each row alone (dim=-1), or use a norm that keeps running statistics for evaluation",
        explains=EXPLAINS,
        change=("seen",),
        settle="rows_interact=True says that it is meant, rows_interact=False makes it a fault",
    ),
    "view_mixes_rows": Cause(
        proof="with a transpose in place of the view no output depends on another row",
        repair="use transpose or permute to swap axes: view and reshape only split the same numbers otherwise",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "rows_as_positions": Cause(
        proof="with the other value of batch_first no output depends on another row",
        repair="batch_first=True, or give the layer (positions, rows, features)",
        explains=EXPLAINS,
        change=("layer", "seen"),
    ),
    "rows_interact": Cause(
        proof="one row's output has a gradient with respect to another row: a fault where rows_interact=False is "
        "declared",
        repair="let each output depend on its own row, or declare rows_interact=True",
        explains=EXPLAINS,
        change=("seen",),
        settle="rows_interact=True says that it is meant, rows_interact=False makes it a fault",
    ),
    "labels_of_other_rows": Cause(
        proof="outputs that depend on one row are compared with targets of others, in no fixed order",
        repair="bring outputs and targets into one order",
        explains=EXPLAINS,
    ),
    "labels_of_all_rows": Cause(
        proof="the loss is the same whichever row has which target, and each target adds to the gradient of every row",
        repair="compare each row with its own target: both sides of one shape, logp[torch.arange(len(y)), y] in "
        "place of logp[:, y]",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "all_pairs_of_rows": Cause(
        proof="with one side's rows in another order no row's share of the gradient changes, though the table of all "
        "pairs is in the loss",
        repair="give both sides one shape: squeeze(-1) what is (N, 1), or keepdim=True in what is (N,)",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "weights_averaged": Cause(
        proof="the rows' weights may change places and no gradient changes, while their sum scales all of it",
        repair='multiply each row\'s own loss: (F.cross_entropy(out, y, reduction="none") * weight).mean()',
        explains=EXPLAINS,
        change=("seen",),
    ),
    "similarity_over_rows": Cause(
        proof="with the similarity along another axis no row's share of the gradient depends on another row",
        repair="compare the vectors of each row: cosine_similarity(a, b, dim=-1)",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "cumulated_over_rows": Cause(
        proof="with the running sum along another axis no row's share of the gradient depends on another row",
        repair="add up along the steps of each row: cumsum(dim=1) where rows are the first axis",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "copies_in_two_orders": Cause(
        proof="with the copies of rows laid out the other way no row's share of the gradient depends on another row",
        repair="lay out all copies one way: repeat_interleave(n, dim=0) for each tensor, or repeat for each; halves of "
        "what cat joined are chunk(2)",
        explains=EXPLAINS,
        change=("seen",),
        settle="rows_interact=True says that rows of one tensor are to meet other rows of another",
    ),
    "order_matters": Cause(
        proof="the loss changes where all rows change places together: a fault where ordered=False is declared",
        repair="sort by what the order is to mean inside the loss, or declare ordered=True",
        explains=EXPLAINS,
        settle="ordered=True says that the order of rows is meant, ordered=False makes it a fault",
    ),
}

_MEANT = (PRODUCTS - {"linear"}) | ATTENTION | SCATTERS | EXTREMES | {"__matmul__", "baddbmm", "cdist", "median"}
"""Operations that join rows on purpose where nothing else is known: products of rows, sums over edges, pooling. A
linear layer takes each row alone."""

_CAUSE_OF = {
    "softmax": ("softmax_over_rows", "with the softmax along another axis"),
    "normalised": ("normalised_over_rows", "with each row normalised alone, or by constants,"),
    "views": ("view_mixes_rows", "with the axes swapped by a transpose"),
    "batch_first": ("rows_as_positions", "with the other value of batch_first"),
}
"""What keeps rows apart: the cause that this proves, and in words."""

_RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})
"""Over what was told of the rows, these need them sorted, as risk sets do."""

_PROVEN = frozenset(cause for cause, _ in _CAUSE_OF.values())


@check(needs={"run"}, causes=CAUSES, rank=30, steps=50)
def batch_independence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.batch_independence.label_rows import LabelRows
    from pytest_trainloop.checks.batch.batch_independence.meetings import meeting
    from pytest_trainloop.checks.batch.batch_independence.shares import RowShares
    from pytest_trainloop.checks.batch.batch_independence.unpaired import unpaired

    labels = evidence.shared(LabelRows.of)
    if labels.mismatched:
        yield _in_few_rows(evidence, _mismatched(labels))
        return
    met = evidence.shared(meeting)
    if met is not None and met.why in ("every", "permuted"):
        yield _shrunk(evidence, met, outside.of_labels(met))
        return
    declared = evidence.declared("rows_interact")
    if not declared and met is not None and met.fix is not None and met.fix.of_layout:
        yield _shrunk(evidence, met, outside.of_operation(met))
        return
    lost = evidence.shared(unpaired) if not declared else None
    if lost is not None:
        yield _in_few_rows(evidence, outside.of_unpaired(lost)) if lost.kind == "side" else outside.of_unpaired(lost)
        return
    if not declared:
        try:
            inside = list(_inside(evidence, declared, quiet=met is not None and met.why == "operation"))
        except CannotDecide:
            found = list(_order(evidence, met)) if evidence.declared("ordered") is False else []
            if not found:
                raise
            yield from found  # seen in the loss, whatever the model returns
            return
        found = [_in_few_rows(evidence, f) if met is not None else f for f in inside]
        yield from found or _outside(evidence, met, declared)
        if inside or (met is not None and (met.why == "operation" or declared is False)):
            return
    ordered = list(_order(evidence, met))
    yield from ordered
    if declared:
        raise DoesNotApply("rows_interact=True declares that rows interact on purpose")
    if not ordered:
        RowShares.require_taken(evidence)


def _inside(evidence: Evidence, declared: bool | None, *, quiet: bool) -> Iterator[Finding]:
    """Rows that meet in the model, on the way to its outputs; ``quiet``: what cannot be decided is left to what is
    seen outside."""
    from pytest_trainloop.checks.batch.batch_independence.passes import RowPasses

    try:
        found = evidence.shared(RowPasses).interaction()
        yield from _judged(found, declared)
    except CannotDecide:
        if not quiet:
            raise


def _judged(found: RowInteraction | None, declared: bool | None) -> Iterator[Finding]:
    if found is None or (found.why == "batch_norm" and declared is None):
        return
    through = f", through {found.ops[0].named} ({found.ops[0].place})" if found.ops else ""
    if found.why in _CAUSE_OF and found.rows_known:
        cause, fix = _CAUSE_OF[found.why][0], _fix_in_words(found)
        yield _finding(found, cause, f"{fix} every such gradient is exactly 0")
    elif found.why == "data_normalised" and found.rows_known:
        cause, fix = _CAUSE_OF["normalised"]
        level: Level = "advice" if declared is None else "fault"
        yield _finding(found, cause, f"{fix} every such gradient is exactly 0", level=level)
    elif declared is False:
        yield _finding(found, "rows_interact", "rows_interact=False is declared")
    elif not found.rows_known:
        raise CannotDecide(
            f"entries of the batch's first axis interact in the model{through}, and whether these are rows or "
            "positions is not known: give batch_dim=0 if they are rows, batch_dim=1 if the second axis holds them",
            needs="batch_dim=",
        )
    elif found.ops and found.ops[0].name not in _MEANT:
        yield _finding(found, "rows_interact", "the gradient of single rows", level="advice")
    else:
        raise CannotDecide(
            f"rows interact in the model{through}: declare rows_interact=True if that is meant, "
            "rows_interact=False if not",
            needs="rows_interact=",
        )


def _fix_in_words(found: RowInteraction) -> str:
    """What keeps rows apart, with the arguments that were changed where these are known."""
    from pytest_trainloop.tracing.operation_fixes import axes_of_fix

    op = found.ops[0]
    axes = axes_of_fix(op, found.rows)
    if axes is not None:
        return f"with dim={axes[1]} in place of dim={axes[0]}"
    unpacked = bool(op.inputs) and op.inputs[0].dim() == 3
    if op.name in RECURRENT and unpacked and op.args and isinstance(op.args[-1], bool):
        return f"{op.module or 'the layer'} has batch_first={op.args[-1]}; with batch_first={not op.args[-1]}"
    return _CAUSE_OF[found.why][1]


def _outside(evidence: Evidence, met: Meeting | None, declared: bool | None) -> Iterator[Finding]:
    """Rows that meet in the loss, or in what is made of the batch."""
    from pytest_trainloop.checks.batch.batch_independence.shares import RowShares

    if met is None:
        return
    if met.why == "operation" and met.rows_known:
        yield _shrunk(evidence, met, outside.of_operation(met))
    elif met.why == "operation" and declared is None and met.fix is not None:
        raise CannotDecide(
            f"entries of the batch's first axis meet in {met.fix.named} ({met.fix.place}), and whether these are rows "
            "or positions is not known: give batch_dim=0 if they are rows, batch_dim=1 if the second axis holds them",
            needs="batch_dim=",
        )
    elif declared is False:
        shares = evidence.shared(RowShares.of)
        if shares is None or not shares.repeats():
            raise Unreliable(
                "two identical steps of the loop differ, so that what rows do is not known: see determinism"
            )
        yield _shrunk(evidence, met, outside.of_declared(met))


def _order(evidence: Evidence, met: Meeting | None) -> Iterator[Finding]:
    """Whether the loss changes where all rows change places together."""
    from pytest_trainloop.checks.batch.batch_independence.order import order_of_rows
    from pytest_trainloop.checks.batch.batch_independence.smallest import in_order

    declared = evidence.declared("ordered")
    running = met is not None and met.call is not None and met.call.carries_gradient and met.call.name in _RUNNING
    if declared or (declared is None and not running):
        return
    found = evidence.shared(order_of_rows)
    if found is not None:
        finding = outside.of_order(found, "fault" if declared is False else "advice")
        yield outside.shrunk(finding, len(found.order), in_order(evidence))


def _in_few_rows(evidence: Evidence, finding: Finding) -> Finding:
    """What was seen in the model, or at a loss function, with the fewest rows that show it."""
    from pytest_trainloop.checks.batch.batch_independence.smallest import that_meet_in_any_way

    least = that_meet_in_any_way(evidence)
    return finding if least is None else outside.shrunk(finding, 0, least)


def _shrunk(evidence: Evidence, met: Meeting, finding: Finding) -> Finding:
    from pytest_trainloop.checks.batch.batch_independence.smallest import that_meet

    return outside.shrunk(finding, met.rows, that_meet(evidence, met))


def _mismatched(labels: LabelRows) -> Finding:
    label, row = labels.mismatched[0]
    shown = "outputs were followed by their gradients, and labels through the operations on them"
    repair = change = ""
    if labels.order == "permuted":
        shown += ": the outputs checked are those of different rows, in another order than the labels"
        repair = "put sorted rows back before they are returned: out = out[order.argsort()]; or sort the targets too"
        change = labels.reordered[0] if len(labels.reordered) == 1 else ""
    elif labels.order == "swapped":
        shown += ": outputs of several rows meet the labels of one"
        repair = "transpose both outputs and targets before this line, or neither: scores.transpose(0, 1)"
        change = labels.where
    return Finding(
        cause="labels_of_other_rows",
        summary=f"{labels.loss} compares outputs with the labels of other rows",
        measured=(
            f"the label of row {label} is compared with an output that depends on input row {row} alone; "
            f"{len(labels.mismatched)} of the {len(labels.pairs)} outputs checked stand at another row's label"
        ),
        shown_by=shown,
        culprits=(labels.loss,),
        where=labels.where,
        change=change,
        repair=repair,
        smallest=f"{labels.rows} rows",
    )


def _finding(found: RowInteraction, cause: str, shown: str, *, level: Level = "fault") -> Finding:
    op = found.ops[0] if found.ops else None
    one_layer = cause == "rows_as_positions" and len({o.module for o in found.ops}) == 1
    summary = {
        "softmax_over_rows": "a softmax runs over the rows of the batch, not over one row's classes or keys",
        "normalised_over_rows": "rows are normalised by each other, not each alone",
        "view_mixes_rows": f"{op.name if op else 'a view'} to another order of axes mixes the rows of the batch",
        "rows_as_positions": f"{op.named if op else 'a layer'} takes the rows of the batch for positions in a sequence",
        "rows_interact": f"rows interact in the model, through {op.named if op else 'an unknown operation'}",
    }
    return Finding(
        cause=cause,
        level=level,
        summary=summary[cause],
        measured=f"in evaluation mode output row {found.output} has a gradient with respect to input row {found.input}",
        shown_by=shown,
        culprits=tuple(dict.fromkeys(o.named for o in found.ops)),
        where=str(op.place) if op else "",
        change="\n".join(dict.fromkeys(str(o.place) for o in found.ops)) if cause in _PROVEN and not one_layer else "",
        smallest=f"{found.rows} rows",
    )
