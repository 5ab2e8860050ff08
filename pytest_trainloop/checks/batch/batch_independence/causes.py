"""The causes of ``batch_independence``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.core.registry import Cause, finding_maker

_REFERENCE = "https://docs.pytorch.org/docs/stable/generated/torch."

_IN_THE_MODEL = {
    "measured": "in evaluation mode output row {output} has a gradient with respect to input row {input}",
    "shown_by": "{fix} every such gradient is exactly 0",
}
_IN_THE_LOSS = {
    "measured": "the gradient of row {share} changes with the values of {others}",
    "shown_by": "{fix} that gradient stays the same",
}
_ANY_ORDER = "with the rows of {target} in another order the gradient is the same"
_SIDE_ORDER = "with the rows of one side in another order the gradient is the same"

_cause = partial(Cause, explains=(*LEARNING, "causality", "padding_invariance"))
_seen = partial(_cause, change=("seen",))
_either = partial(_seen, **_IN_THE_MODEL, variants={"in the loss": _IN_THE_LOSS})
_loss = partial(_seen, **_IN_THE_LOSS)

CAUSES = {
    "softmax_over_rows": _either(
        proof="no output depends on other rows once the softmax runs along another axis",
        summary="a softmax runs over the rows of the batch, not over one row's classes or keys",
        repair="take the softmax over the axis of classes or keys: softmax(x, dim=-1)",
        source=_REFERENCE + "nn.functional.softmax.html",
        change=("layer", "seen"),
    ),
    "normalised_over_rows": _either(
        proof="no output depends on other rows once each row is normalised alone, or its statistics are constants",
        summary="rows are normalised by each other, not each alone",
        repair="normalise each row alone (dim=-1), or use a norm that keeps running statistics for evaluation",
        settle="rows_interact=True says that rows are to interact",
        judged="rows_interact=False makes it a fault",
        source="https://github.com/speechbrain/speechbrain/issues/1247",
        change=("layer", "seen"),
    ),
    "view_mixes_rows": _either(
        proof="no output depends on other rows once a transpose takes the place of the view",
        summary="{through} to another order of axes mixes the rows of the batch",
        repair="use transpose or permute to swap axes: view and reshape only split the same numbers otherwise",
        variants={
            "in the loss": {
                "summary": "{names} cuts the batch into rows that are not those it was joined from",
                **_IN_THE_LOSS,
            }
        },
        source=_REFERENCE + "Tensor.view.html",
    ),
    "rows_as_positions": _either(
        proof="no output depends on other rows once batch_first has its other value",
        summary="{through} takes the rows of the batch for positions in a sequence",
        repair="batch_first=True, or give the layer (positions, rows, features)",
        change=("layer", "seen"),
        variants={},
        source=_REFERENCE + "nn.LSTM.html",
    ),
    "positions_by_row": _seen(
        proof="an output changes with the place of its row in the batch, and with the table read along positions it "
        "does not",
        summary="each row of the batch gets one position: {through} adds a table that is cut to the number of rows",
        measured="the table has {table:position}, and the input {steps}; all of them get that of the row",
        shown_by="with the rows in reverse the outputs are other ones; with the table along the positions they are not",
        repair="cut the table to the positions of batch-first inputs: x + pe[: x.size(1)].transpose(0, 1)",
        source="https://github.com/songyangco/GETNext/issues/2",
    ),
    "rows_interact": _seen(
        proof="one row's output has a gradient with respect to another row: a fault where rows_interact=False is "
        "declared",
        summary="rows interact in the model, through {through}",
        measured=_IN_THE_MODEL["measured"],
        shown_by="{declared:?rows_interact=False is declared|the gradient of single rows}",
        repair="let each output depend on its own row, or declare rows_interact=True",
        settle="rows_interact=True says that rows are to interact",
        judged="rows_interact=False makes it a fault",
        variants={
            "in the loss": {
                "summary": "rows interact in the loss, through {through}",
                "measured": _IN_THE_LOSS["measured"],
                "shown_by": "rows_interact=False is declared",
            },
        },
        source="https://github.com/rish-16/aft-pytorch/issues/1",
    ),
    "mask_of_other_rows": _seen(
        proof="in evaluation mode an output row changes when only the mask of another row changes",
        summary="outputs of a row change with {mask} of another row{through:?, through {through}|}",
        measured="output row {output} changes by {by:share} when row {input} gets {mask} of another row",
        shown_by="two passes in evaluation mode{counted:?; with the count of each row in place of that of the batch no "
        "other row changes|}",
        repair="take sums and counts of a mask over one row's own positions: mask.sum(1, keepdim=True)",
        settle="rows_interact=True says that rows are to interact",
        judged="rows_interact=False makes it a fault",
        source="https://github.com/SeanLee97/AnglE/pull/102",
    ),
    "labels_of_other_rows": _cause(
        change=("targets",),
        proof="outputs that depend on one row are compared with targets of others, in no fixed order",
        summary="outputs are compared with {target} of other rows, by {by}",
        measured="{target} of row {label} changes the gradient of row {row}, and that of no other row; {wrong} of the "
        "{checked} targets checked change that of another row than their own",
        shown_by="one target at a time was given another value, and the gradient of each row compared",
        repair="bring outputs and targets into one order: sort both, or put sorted rows back: out[order.argsort()]",
        variants={
            "several": {
                "shown_by": "one target at a time was given another value: targets of one row meet outputs of several "
                "rows",
                "repair": "transpose both outputs and targets before they are compared, or neither: "
                "scores.transpose(0, 1)",
            },
            "mixed": {
                "measured": "row {label} is mixed into other rows, and {target} of it changes the gradient of row "
                "{row}, into which it is not mixed; {wrong} of the {checked} targets checked do so",
                "repair": "mix inputs and targets by one permutation: order = torch.randperm(len(x)), then x[order] "
                "and y[order]",
            },
        },
        source="https://github.com/xudonmao/VMT/issues/1",
    ),
    "labels_of_all_rows": _seen(
        proof="the loss is the same whichever row has which target, and each target adds to the gradient of every row",
        summary="each row is compared with {target} of all rows, by {by}",
        measured="{shapes}: one entry for each pair of the {rows} rows",
        shown_by=_ANY_ORDER,
        repair="compare each row with its own target: both sides of one shape, logp[torch.arange(len(y)), y] in "
        "place of logp[:, y]",
        source="https://github.com/shivamsaboo17/Overcoming-Catastrophic-forgetting-in-Neural-Networks/pull/5",
    ),
    "all_pairs_of_rows": _seen(
        proof="(N, 1) and (N,) broadcast to N by N and are summed: whatever the order of one side's rows, each row has "
        "the same gradient",
        summary="{by} of (N, 1) and (N,) joins each row with all rows, and the loss sums up all pairs",
        measured="of {rows} rows it makes ({rows}, {rows}), one entry for each pair of rows",
        shown_by=_SIDE_ORDER,
        repair="give both sides one shape: squeeze(-1) what is (N, 1), or keepdim=True in what is (N,)",
        source="https://github.com/LAMDA-Tabular/TALENT/pull/92",
        change=("reduction before", "seen"),
    ),
    "weights_averaged": _seen(
        proof="reordering the row weights changes no gradient: only their sum counts",
        summary="{target} holds one weight for each row, and every row is weighted by their mean",
        measured="{rows} rows with weights of their own; the gradient of each is scaled by the sum of all",
        shown_by=_ANY_ORDER,
        repair='multiply each row\'s own loss: (F.cross_entropy(out, y, reduction="none") * weight).mean()',
        source="https://github.com/rlcode/per/issues/3",
        change=("loss before", "seen"),
    ),
    "similarity_over_rows": _loss(
        proof="no row's gradient depends on other rows once the similarity runs along another axis",
        summary="{names} compares columns of the batch, not the vectors of each row",
        repair="compare the vectors of each row: cosine_similarity(a, b, dim=-1)",
        source=_REFERENCE + "nn.functional.cosine_similarity.html",
    ),
    "cumulated_over_rows": _loss(
        proof="no row's gradient depends on other rows once the running sum goes along another axis",
        summary="{names} adds up over the rows of the batch, not over the steps of each row",
        repair="add up along the steps of each row: cumsum(dim=1) where rows are the first axis",
        source=_REFERENCE + "cumsum.html",
    ),
    "copies_in_two_orders": _loss(
        proof="no row's gradient depends on other rows once the copies of rows are laid out the other way",
        summary="copies of rows are laid out in two orders, by {names}",
        repair="lay out all copies one way: repeat_interleave(n, dim=0) for each tensor, or repeat for each; halves of "
        "what cat joined are chunk(2)",
        settle="rows_interact=True says that rows of one tensor are to meet other rows of another",
        variants={
            "repeated": {
                "summary": "{names} puts copies of the whole batch one after the other, and another tensor has the "
                "copies of each row together",
            },
            "interleaved": {
                "summary": "{names} puts the copies of each row together, and another tensor has copies of the whole "
                "batch one after the other",
            },
            "strided": {
                "summary": "a slice with a step splits what was joined as whole batches one after the other",
            },
            "halved": {
                "summary": "one part after the other is cut from what has the copies of each row together",
            },
        },
        source=_REFERENCE + "repeat_interleave.html",
    ),
    "order_matters": _cause(
        change=("index",),
        proof="the loss changes when rows change places together: a fault if ordered=False is declared, if the model "
        "sorts its rows, or if whole groups change places",
        summary="the loss changes by {change_of_loss:.2g} of itself when the rows of the batch change places together",
        measured="{before:.6g} as they are, {after:.6g} in the order {order}",
        shown_by="{declared:?ordered=False is declared|two steps from the same weights over the same rows}",
        repair="sort by what the order is to mean inside the loss, or declare ordered=True",
        settle="ordered=True says that the order of rows is intended",
        judged="ordered=False makes it a fault",
        variants={
            "sorted": {
                "summary": "the model sorts the rows that it gets and gives them sorted, while the loss pairs them "
                "with rows in the order of the batch",
                "shown_by": "rows enter the model in one order, in whichever the batch comes, and the loss changes "
                "with that of the batch",
                "repair": "put the rows back before they are returned: out[order.argsort()], of the order that sorted "
                "them; or pack_padded_sequence(..., enforce_sorted=False), which needs no sorting",
            },
            "groups": {
                "summary": "the loss changes by {change_of_loss:.2g} of itself when whole groups of rows change "
                "places: {target} says which rows belong together, and the loss pairs other rows",
                "shown_by": "the rows of each group stay together and in order; rows_interact=True says that rows "
                "interact, and not with which",
                "repair": "group rows by their number: for g in ids.unique(): rows = ids == g; not by slices of one "
                "size",
            },
        },
        source="https://github.com/areal-project/AReaL/issues/1419",
    ),
}

found = finding_maker(CAUSES)
