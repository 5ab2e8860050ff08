"""The causes of ``every_row_teaches``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.core.registry import Cause, finding_maker

_seen = partial(Cause, change=("seen",))
_NO_GRADIENT = (*LEARNING, "every_param_moves", "gradient_reaches_every_param", "input_dependence", "loss_at_init")
_ZERO = "in {passes} backward passes under {seeds} seeds the loss is 0.0, and every gradient is 0 or missing"
_SEVERAL = "the {end} {number}of {count} rows"

SIZES = {
    "constant": "in a batch of {twice} rows too, only the {other} {kept} used",
    "some": "in a batch of {used} rows the {end} {are} left out as well",
    "share": "a batch of {used} rows loses a part of them as well",
    "remainder": "a batch of {used} rows is used whole",
}
"""How the rows left out depend on the number of rows: all beyond a constant number; so many of any number; more of
more; those that are too many for parts of one size."""

CAUSES = {
    "hinge_never_active": _seen(
        proof="the loss is exactly 0 under every seed, and without its clamp gradients arrive",
        summary="the loss is always exactly 0: {op} finds each margin kept",
        measured=_ZERO,
        shown_by="without {op} gradients arrive. A hinge loss of equal inputs is its margin, and this {op} gives 0",
        repair="add the margin to what is clamped, so that equal sides cost it: relu(rejected - chosen + margin), or "
        "relu(margin + d_positive - d_negative)",
        explains=_NO_GRADIENT,
        variants={
            "several": {
                "summary": "the loss is always exactly 0: {op} cuts every entry (the largest of {entries} is "
                "{largest:.3g})",
            },
        },
    ),
    "weights_cut_to_zero": Cause(
        proof="weights in the loss are 0, and with their fractions kept they are not",
        summary="{zeros} of {count} weights in the loss are 0: {names} removes their fractions",
        measured="rows with these weights cost nothing and have no gradient",
        shown_by="with the fractions kept, the loss has another value",
        repair="compute weights in floating point: counts / total, not counts // total",
        explains=_NO_GRADIENT,
        variants={
            "all": {
                "summary": "the loss is always exactly 0: {op} multiplies it by weights that are all 0",
                "measured": _ZERO,
                "shown_by": "{names} makes them 0. With the fractions kept, gradients arrive",
            },
        },
        source="https://github.com/tensorflow/tensorflow/issues/37747",
    ),
    "one_input_for_two": _seen(
        proof="two equal calls are made with one tensor of the batch, and none with another that is like it",
        summary="the model reads {read} twice, and never {unread}, which has its shape and dtype",
        measured="{calls:torch function} {several:?get|gets} {read} twice with the same weights, and "
        "{several:?return|returns} equal numbers",
        shown_by="no call reads {unread}, and its values differ from those of {read}",
        repair="give each of the two calls its own input",
        explains=(*LEARNING, "input_dependence", "every_param_moves"),
        settle="leave what is not used out of the batch",
        source="https://github.com/lin-tan/CoCoNut-Artifact/issues/3",
    ),
    "one_target_for_all_rows": _seen(
        proof="of a tensor of the batch whose rows differ one row is read, and meets the outputs of all rows",
        summary="the outputs of all {rows} rows are compared with row {row} of {name}",
        measured="only {name}[{row}] is read. The loss is {before:.4g}, and {after:.4g} with the whole of {name}",
        shown_by="{op} broadcasts it against all {rows} outputs. The rows of {name} differ",
        repair="compare each row's output with its own target",
        explains=(*LEARNING, "batch_independence", "loss_contract"),
    ),
    "flags_as_indices": _seen(
        proof="of all rows only those at positions 0 and 1 are read, over and over, by flags of 0 and 1",
        summary="{names} is 0 or 1 for each row, and is used as an index: only the first two of {rows} rows are read",
        measured="the first step reads row 1 {ones} times and row 0 {zeros} times. No other index in {steps} steps",
        shown_by="an integer tensor takes the rows at these positions. A boolean one takes those where it is True",
        repair="index with a boolean mask: x[flags.bool()]",
        explains=(*LEARNING, "batch_independence", "loss_contract", "loss_formula"),
        source="https://github.com/Novartis/torchsurv/issues/117",
    ),
    "class_costs_a_constant": _seen(
        proof="rows of one class alone have a loss above 0 that no weight changes, and no gradient",
        summary="rows whose {names} is 0 cost {cost:.3g}, whatever the model returns, and teach nothing",
        measured="on these rows alone the loss is equal bit for bit at {states} states of the weights, and every "
        "gradient is exactly 0",
        shown_by="rows with 1 have gradients{signed:?. With -1 in place of 0, these rows have gradients too|}",
        repair="sign = 2 * y - 1   # labels of -1 and 1\nor give these rows a term of their own",
        explains=LEARNING,
        source="https://github.com/bfortuner/ml-glossary/pull/113",
    ),
    "rows_left_out": _seen(
        proof="any other rows in their place leave losses, gradients and weights the same, bit for bit",
        summary=_SEVERAL + " of the batch {are} never used",
        measured="with other rows in place of {named}, losses, gradients and weights are equal bit for bit, over "
        "{steps} steps at moved weights",
        repair="take all rows: leave out the slice ([:-1], [:n]), or let the loop over rows end at len(x)",
        explains=(*LEARNING, "accumulation_equivalence", "batch_independence", "edge_batches"),
        judged="pass a batch whose rows should all be used",
        variants={
            "statistics": {
                "summary": _SEVERAL + " of the batch {are} used for the statistics of a batch norm only",
                "repair": "take all rows in the loss",
            },
            "others": {
                "summary": "some rows of the batch are never used, " + _SEVERAL + " among them: every other one or so "
                "is taken",
                "repair": "where this is the part of one process, nothing; else take all rows",
            },
            "remainder": {
                "summary": _SEVERAL + " of the batch {are} left out, which may be too many for parts of one size",
                "repair": "let the last part be smaller; or give a batch of {used} rows",
            },
        },
        source="https://github.com/google-deepmind/gemma/issues/48",
    ),
}

found = finding_maker(CAUSES)
