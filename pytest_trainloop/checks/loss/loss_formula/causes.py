"""The causes of ``loss_formula``: one for each kind of wrong ingredient, whatever the form. Plain data, no torch.

Where no other texts are given, what is wrong is said by the mistake of the form (``formulas/form.py``).
"""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

LEARNING = ("loss_at_init", "overfit_one_batch", "update_ratio")

_of_form = partial(
    Cause,
    summary="{form}: {mistake}",
    measured=(
        "{trained:?{trained}|value and gradient equal the form named above, to rounding, at {count} values of its "
        "inputs, in float64}"
    ),
    shown_by=(
        "the textbook form does not give this value; with the difference named above it does, at {count} values of its "
        "inputs, in float64"
    ),
    explains=LEARNING,
    change=("seen",),
)
_AS_SCORES = "the loss equals the form with the output of a layer in the place of its probabilities"

CAUSES = {
    "scores_as_probabilities": _of_form(
        proof="the loss equals a form that takes probabilities, and is given the output of a layer, below 0 or above 1",
        summary="{form} takes probabilities and is given the output of {layer}, from {low:.3g} to {high:.3g}",
        shown_by=_AS_SCORES,
        repair="take sigmoid (one class) or softmax along the class axis first",
        variants={
            "logarithms": {
                "summary": "{form} takes log-probabilities and is given the output of {layer}, up to {high:.3g}",
            }
        },
        source="https://github.com/ScrollPrize/villa/pull/1644",
    ),
    "probabilities_as_scores": _of_form(
        proof="the loss equals a form that takes a sigmoid or softmax, and is given the result of one",
        summary="{form} takes scores and is given probabilities, from {low:.3g} to {high:.3g}",
        shown_by="the loss equals the form with the result of a sigmoid or softmax in the place of its scores",
        repair="give the scores as they are: the loss takes the sigmoid or softmax itself",
        variants={
            "squashed twice": {
                "summary": (
                    "{form} is given a sigmoid or softmax taken twice: after the second the values lie in {low:.3g} to "
                    "{high:.3g}"
                ),
                "shown_by": "no layer lies between the two: the model's output is squashed, and squashed again",
                "repair": "leave one of the two out: the one in the model, or the one in the loss",
            }
        },
        source="https://github.com/Hsuxu/Loss_ToolBox-PyTorch/issues/11",
    ),
    "labels_as_signs": _of_form(
        proof="the loss equals a form that takes -1 and 1, and is given 0 and 1",
        summary="{form} takes -1 and 1 and is given 0 and 1",
        shown_by=(
            "the loss equals the form with targets of 0 and 1: rows with 0 cost the margin, whatever the model gives"
        ),
        repair="sign = 2 * y - 1",
        explains=(*LEARNING, "every_row_teaches:class_costs_a_constant"),
        source="https://github.com/deepchem/deepchem/issues/5017",
    ),
    "box_format": _of_form(
        proof="the loss equals a form that reads boxes by their corners, and what the batch holds is no such box",
        summary="{form} takes two corners, and the second is not the larger one in {rows}",
        shown_by=(
            "the loss equals the form with boxes read by corners; read as centre, width and height all are boxes"
        ),
        repair="convert boxes from (centre, width, height) to corners before they are given to this function",
        variants={
            "reversed": {
                "shown_by": "the loss equals the form with boxes read by corners; these boxes have a side below 0",
                "repair": "keep the first corner the smaller one where boxes are changed. A flip swaps the two sides: "
                "x1, x2 = width - x2, width - x1",
            }
        },
        source="https://github.com/stevebottos/owl-vit-object-detection/issues/14",
        change=("entry", "seen"),
    ),
    "sign_flipped": _of_form(
        proof="the loss holds a textbook form, or a distance from the target, and its gradient makes that worse",
        summary="{form} is a {score:?score, and is minimised|cost, and is maximised}: training makes it worse",
        shown_by="the gradient of what is backpropagated with respect to it; nothing else trains these outputs",
        repair="turn the sign: minimise a cost (1 - dice, -log p), not a score",
        variants={
            "form": {"repair": "1 - score, or -score, for a score; the cost without its minus for a cost"},
            "distance": {
                "summary": "the distance between prediction and target is made larger",
                "measured": "{trained:?{trained}|{counted} differences}",
                "shown_by": (
                    "the gradient of what is backpropagated with respect to all {counted} differences that have one, "
                    "above and below the target; nothing else trains these outputs"
                ),
                "repair": "on the way to backward() the sign is turned: leave that minus out",
            },
        },
        change=("use of the score", "seen"),
        source="https://github.com/IAmSuyogJadhav/3d-mri-brain-tumor-segmentation-using-autoencoder-regularization/issues/7",
    ),
    "factor_missing": _of_form(
        proof="the loss equals a form without one constant factor, and not with it",
        repair="put the factor in",
        source="https://github.com/SupaeroDataScience/deep-learning/pull/6",
    ),
    "term_missing": _of_form(
        proof="the loss equals a form without one of its terms; no other part of the loss adds it back",
        repair="add the term",
        source="https://github.com/pairlab/SlotFormer/pull/7",
    ),
    "term_sign": _of_form(
        proof="the loss equals a form with the sign of one of its terms turned, and not the textbook form",
        repair="turn the sign of that term",
        source="https://github.com/keras-team/keras/issues/4108",
    ),
    "clamp_missing": _of_form(
        proof="the loss equals a form without its clamp, and differs from it with the clamp",
        repair="clamp(min=0)",
        source="https://github.com/yhenon/keras-frcnn/issues/45",
    ),
    "wrong_axes": _of_form(
        proof="the loss equals a form with sums, means or a softmax over other axes than its own",
        repair="reduce over the axes of the form",
        variants={
            "softmax": {
                "summary": "{form}: probabilities sum to 1 along axis {summed}, and classes lie along axis {classes}",
                "shown_by": "the sums of both along each axis",
                "repair": "softmax(dim={classes})",
            }
        },
        source="https://github.com/EDAPINENUT/GNTPP/issues/4",
    ),
    "entries_misaligned": Cause(
        proof="both sides are reshaped copies of tensors with the same axes, and entries of different places meet",
        summary=(
            "{function}() compares entries of different places: one side is laid out as {mine}, the other as {theirs}"
        ),
        measured="{trained:?{trained}|{entries} pairs of entries, in two orders}",
        shown_by="the same reshapes and transposes, applied to the places of the entries",
        repair="before both are reshaped, bring the axes into one order: one_hot(y, C).movedim(-1, 1) for (N, C, ...)",
        explains=LEARNING,
        change=("seen",),
        variants={
            "scores": {
                "summary": (
                    "{function} compares labels with the scores of other positions: scores of shape {theirs} are "
                    "reshaped to {mine}, which spreads the scores of one position over several"
                ),
                "measured": "{trained:?{trained}|{entries} pairs of entries}",
                "shown_by": (
                    "the same reshapes, applied to the places of the entries: whichever axis holds the classes, some "
                    "label meets another position's scores"
                ),
                "repair": "scores.movedim(1, -1).reshape(-1, classes)",
            }
        },
        source="https://github.com/qubvel-org/segmentation_models.pytorch/pull/461",
    ),
    "errors_cancel": Cause(
        proof="the loss stays the same when any errors of mean 0 are added to the differences",
        summary="only the mean of the differences counts: errors of opposite sign cancel",
        measured="{trained:?{trained}|{entries} differences}",
        shown_by=(
            "the loss is the same with random errors of mean 0 added to them, and another with all raised by 1; "
            "nothing else trains these outputs"
        ),
        repair="take the square or the absolute value of each difference before the mean: (p - t).square().mean()",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/mlfoundations/open_lm/pull/92",
    ),
    "power_differs": _of_form(
        proof="the loss equals a form with another power of one of its parts: squared for plain, or plain for squared",
        repair="take the power that the form has",
        source="https://github.com/fudannlp16/focal-loss/issues/8",
    ),
    "mean_taken_early": _of_form(
        proof=(
            "the loss equals a form applied to a mean over the batch, and not row by row, or a minimum over "
            "permutations is taken for all rows, and some rows alone choose another"
        ),
        repair="apply the form to each entry or row, and take the mean last",
        settle="rows_interact=True says that one permutation for all rows is wanted",
        judged="rows_interact=False makes it a fault",
        variants={
            "permutation": {
                "summary": (
                    "{function} chooses one permutation for all rows: {alone} of {rows} rows alone choose another (row "
                    "{first} first)"
                ),
                "measured": "the costs of each permutation, of all {rows} rows and of each row alone",
                "shown_by": (
                    "the loop's own calls made again with one row each: their mean is the cost of all, and each cost "
                    "is the first one with the outputs permuted"
                ),
                "repair": (
                    "keep one cost per row and permutation, take the minimum along the permutations, and then the mean"
                ),
            }
        },
        source="https://github.com/kaidic/LDAM-DRW/issues/6",
    ),
    "terms_disagree": Cause(
        proof=(
            "two terms that compare the same outputs with the same targets are best at different outputs, and at the "
            "same ones with one change before one of the terms"
        ),
        summary=(
            "this term ({two}) and {one}() compare the same outputs with the same targets, and no outputs suit both"
        ),
        measured=(
            "{starts} starts. Outputs that are trained freely on both terms keep at least {kept} of what each term "
            "alone can lose. With the change below it is at most {left}"
        ),
        shown_by="the loop's own calls made again with other outputs, in float64; {one}() is at {other}",
        explains=LEARNING,
        change=("entry", "seen"),
        variants={
            "change": {
                "repair": "give this term {made}. Or change what {one}() is given, so that both read the outputs as one"
            }
        },
        source="https://github.com/ScrollPrize/villa/pull/1644",
    ),
    "turned_round": _of_form(
        proof=(
            "the loss equals a form with two arguments, labels or directions changed round, and not the textbook form"
        ),
        repair="change them back",
        source="https://github.com/kumar-shridhar/PyTorch-BayesianCNN/issues/28",
    ),
    "parameter_confused": _of_form(
        proof=(
            "the loss equals a form with a function of one parameter in its place: a logarithm, a variance, a deviation"
        ),
        repair="convert it first: exp(log_variance), std ** 2",
        variants={
            "noise": {
                "summary": "noise is multiplied by {scale}, {same:?which the KL divergence of the same loop takes for "
                "the variance|while the KL divergence of the same loop takes {variance} for the variance}",
                "measured": "the divergence equals that of a normal density with this variance, at {count} values of "
                "its inputs, in float64",
                "shown_by": "fresh noise is multiplied by {scale}; x is what the divergence reads",
                "repair": "multiply it by the deviation: mean + {right} * torch.randn_like(mean)",
            }
        },
        source="https://github.com/DaehanKim/vgae_pytorch/issues/2",
    ),
    "pairs_with_itself": _of_form(
        proof="the loss equals a form with the similarity of each row with itself among what it is compared with",
        repair="mask the diagonal out before the softmax",
        source="https://github.com/Lightning-Universe/lightning-bolts/issues/695",
    ),
    "extreme_turned": _of_form(
        proof="the loss equals a form with a minimum in place of a maximum, or the reverse, and not the textbook form",
        repair="take the other extreme",
        source="https://github.com/yandexdataschool/Practical_RL/issues/248",
    ),
    "target_with_gradient": _of_form(
        proof="the loss equals the textbook form, and a gradient flows through its target",
        repair="compute the target under no_grad(), or detach() it",
        source="https://github.com/astariul/encode-attend-navigate-pytorch/pull/3",
    ),
    "ingredient_differs": _of_form(
        proof="the loss equals a form with one ingredient changed, and not the textbook form",
        repair="put the ingredient right",
        variants={
            "one function": {
                "summary": (
                    "what is multiplied by the label and what is multiplied by 1 - label are the same function: the "
                    "label says nothing"
                ),
                "measured": "equal in the run, and at other settings of all that both are computed of",
                "shown_by": "the loop's own calls made again, with other outputs of layers and other batches",
                "repair": "give the other label its own term",
            }
        },
        source="https://github.com/Project-MONAI/MONAI/issues/644",
    ),
}

found = finding_maker(CAUSES)
