"""The causes of ``loss_contract``, those of targets and positions in ``causes_of_targets``. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.loss.loss_contract.causes_of_targets import LEARNING, NO_SLOPE, OF_TARGETS
from pytest_trainloop.core.registry import Cause, finding_maker

_DOCS = "https://docs.pytorch.org/docs/stable/generated/torch.nn."

_seen = partial(Cause, change=("seen",))
_learns = partial(_seen, explains=LEARNING)
_scores = partial(Cause, change=("layer", "seen"))

_OF_INPUTS = {
    "probabilities_as_logits": _scores(
        proof="the scores come from a softmax or a sigmoid, or every row of every call sums to 1",
        summary="{call} expects logits, and is given probabilities: the result of {source}",
        measured="{least}",
        shown_by="{flags}only casts, reshapes and constant factors lie in between",
        variants={
            "sums": {
                "summary": "{call} expects logits, and is given probabilities: every row of its input sums to 1",
                "shown_by": "in every call all entries are at least 0, and all rows sum to 1 to rounding",
            }
        },
        repair="give the loss the scores as they are: it takes the log-softmax or the sigmoid itself",
        explains=(*LEARNING, *NO_SLOPE, "loss_formula:probabilities_as_scores"),
        source="https://github.com/bkitano/llama-from-scratch/issues/5",
    ),
    "log_probabilities_as_logits": _scores(
        proof="the scores come from log_softmax: harmless to cross_entropy",
        summary="cross_entropy is given log-probabilities (of {source}): harmless, since their log-softmax is the same",
        measured="the exponentials of every row sum to 1",
        repair="leave log_softmax out, or use nll_loss",
        source=f"{_DOCS}CrossEntropyLoss.html",
    ),
    "activation_on_logits": _scores(
        proof="the scores come from a function without values on one side of zero, or of a narrow range",
        summary="{source} is applied to the scores given to {call}: {why}",
        shown_by="only casts, reshapes and constant factors lie in between",
        variants={
            "clamp": {
                "summary": "the scores given to {call} are clamped at 0 from below: no class can get a lower score",
                "shown_by": "a clamp lies between the last layer and the loss",
            }
        },
        repair="leave the activation out after the last layer",
        explains=(*LEARNING, *NO_SLOPE),
        source="https://github.com/Rudrabha/Wav2Lip/issues/227",
    ),
    "dropout_on_logits": _scores(
        proof="dropout lies between the last layer and the loss",
        summary="{source} is applied to the scores given to {call}: a dropped score is 0, which may be the largest one",
        measured="dropout p={rate} on the output of the last layer",
        repair="put the dropout before the last layer",
        explains=LEARNING,
        source="https://github.com/kshitizrimal/Fast-SCNN/issues/1",
    ),
    "temperature_inverted": _learns(
        proof="dot products of unit vectors times less than one half, or distillation with scores times more than 1",
        summary=(
            "both sides of {call} are softmaxes of scores multiplied by {scale}: a temperature divides, and this "
            "factor makes them sharper"
        ),
        shown_by="the constants between the last layers and the softmaxes",
        variants={
            "cosines": {
                "summary": (
                    "dot products of unit vectors are multiplied by {scale} before {call}: a temperature divides, and "
                    "this factor makes all scores nearly equal"
                ),
                "measured": "all scores lie within {width} of each other",
                "shown_by": (
                    "both factors of the product have rows of length 1, and the constants between the product and the "
                    "loss multiply to {scale}"
                ),
            }
        },
        repair="divide the scores by the temperature",
        source="https://github.com/bowang-lab/BLEEP/issues/5",
    ),
    "single_class": _learns(
        proof="the last layer has one output, and its softmax is always 1",
        summary="{call} over one class: its softmax is 1, whatever the model returns",
        measured="input of shape {shape}",
        repair="give the head one output for each class, or use binary_cross_entropy_with_logits",
        explains=(*LEARNING, *NO_SLOPE),
        change=("module", "seen"),
        source="https://github.com/ultralytics/yolov3/issues/191",
    ),
    "wrong_axis": _seen(
        proof="the softmax runs over another axis than the one that the loss takes for the classes",
        summary="{source} normalises over axis {axis} of {size}, and {call} reads the classes from another axis",
        measured="normalised over {entries} entries of axis {axis}",
        shown_by="its result does not sum to 1 over the classes",
        variants={
            "rows": {
                "summary": (
                    "the vectors whose similarities {call} is given are normalised over the batch (dim=0), and have no "
                    "length of 1"
                ),
                "measured": "normalize over axis 0 of {size}",
                "shown_by": "both factors of the product come from normalize(dim=0), and rows are compared",
                "repair": "normalize(x, dim=-1)",
            },
            "examples": {
                "summary": "the input of {call} is normalised over the rows of the batch, not over the classes",
                "measured": "the input sums to 1 along axis {mine}, the target along {theirs}",
                "shown_by": "the sums along each axis",
                "repair": "take both softmaxes along the class axis (dim=-1)",
            },
            "sides": {
                "summary": "the two sides of {call} are distributions over different axes",
                "measured": "the input sums to 1 along axis {mine}, the target along {theirs}",
                "shown_by": "the sums along each axis",
                "repair": "take both softmaxes along the class axis: dim=1 for (N, C), dim=-1 for (N, T, C)",
            },
        },
        repair="normalise along the axis of the classes: dim=1 for (N, C, ...), dim=-1 for (N, T, C)",
        explains=(*LEARNING, "batch_independence", "loss_formula:wrong_axes"),
        source="https://github.com/perone/euclidesdb/issues/2",
    ),
    "class_axis": _seen(
        proof="the entries along the class axis come from several positions of the last layer",
        summary="{call} compares scores {what} along its class axis: {layer} was reshaped to {shape}, not transposed",
        measured="axis 1 of {shape} runs over entries of several positions of the last layer",
        shown_by="the same reshapes applied to the indices of the entries",
        variants={
            "square": {
                "summary": "{call} takes axis 1 of {shape} for the classes, and the last layer gives them on axis 2",
                "measured": "{count} positions and {count} classes: torch accepts the shape because the two are equal",
                "shown_by": "nothing was transposed between the last layer and the loss",
            },
            "raised": {
                "summary": (
                    "{call} takes axis 1 of {shape} for the classes; the targets of {other} say that they are on the "
                    "last axis"
                ),
                "measured": "",
                "shown_by": "torch raised: {error}",
            },
            "steps": {
                "summary": (
                    "the steps that {call} reads as one row come from several rows: {layer} was reshaped to {size}, "
                    "not transposed"
                ),
                "measured": "axis 0 of {size} runs over entries of several rows",
                "repair": "transpose(0, 1) brings (N, T, C) to (T, N, C)",
            },
        },
        repair="transpose(1, 2) (or permute) brings the classes to axis 1; or flatten(0, 1) with flattened targets",
        explains=(*LEARNING, "batch_independence"),
        source=f"{_DOCS}CrossEntropyLoss.html",
    ),
    "logits_as_log_probabilities": _seen(
        proof="the exponentials of the input sum to more than 1, or it is the output of a layer",
        summary="{call} expects log-probabilities, and is given raw scores",
        shown_by="the exponentials of rows sum to more than 1, and no other term of the loss normalises them",
        repair="use cross_entropy, or log_softmax along the class axis first",
        explains=(*LEARNING, "finite"),
        source=f"{_DOCS}NLLLoss.html",
    ),
    "probabilities_as_log_probabilities": _learns(
        proof="the input sums to 1, where its logarithm should",
        summary="{call} expects log-probabilities, and is given probabilities",
        shown_by="the entries of every row sum to 1",
        variants={
            "softmax": {
                "summary": "{call} expects log-probabilities, and is given probabilities: its input comes from softmax",
                "shown_by": "only casts, reshapes and constant factors lie in between",
            }
        },
        repair="give log_softmax of the scores",
        source=f"{_DOCS}KLDivLoss.html",
    ),
    "logits_as_probabilities": _seen(
        proof="raw scores where a binary cross entropy or a divergence takes probabilities",
        summary="{call} expects probabilities, and is given raw scores: the output of a layer{clamped}",
        shown_by="{flags}no sigmoid or softmax lies between the layer and the loss",
        variants={
            "outside": {
                "summary": "{call} expects probabilities, and is given {raw:?raw scores|values} in {input}",
                "measured": "{count} of {all} values outside of [0, 1]",
                "shown_by": "{flags}the values of the input",
            },
            "raised": {
                "summary": "{call} expects probabilities, and is given raw scores in {input}",
                "shown_by": "torch raised: {error}",
            },
            "teacher": {
                "summary": "kl_div expects probabilities as targets, and is given raw scores down to {low}",
                "shown_by": "the target is the output of a layer, and holds values below 0",
                "repair": "take the softmax of the teacher's scores",
            },
        },
        repair="use binary_cross_entropy_with_logits on the scores as they are, or give the sigmoid of them",
        explains=(*LEARNING, "finite", "loss_formula:scores_as_probabilities"),
        source="https://github.com/yunlongdong/FCN-pytorch/issues/7",
    ),
    "probabilities_saturated": _learns(
        proof=(
            "at the first call probabilities are exactly 0 or 1 and wrong, so their gradient is 0; a fault before the "
            "first optimizer step"
        ),
        summary=(
            "{part:share} of the probabilities given to {call} are exactly 0 or 1 and wrong {when}: their loss is "
            "limited to 100 and their gradient is 0"
        ),
        measured="{count} of {all} entries; input in {input}",
        shown_by="the values of the sigmoid at the first call of this line",
        repair="use binary_cross_entropy_with_logits, which keeps the gradient; look at the size of the scores",
        explains=(*LEARNING, *NO_SLOPE),
        source="https://github.com/pytorch/pytorch/issues/24933",
    ),
    "arguments_swapped": _seen(
        proof="the first argument holds probabilities and the second logarithms",
        summary="the arguments of kl_div are swapped: it takes log-probabilities first, then probabilities",
        shown_by="the first sums to 1 in every row, the second holds logarithms",
        variants={
            "reverse": {
                "summary": "only the target of kl_div gets a gradient: this is the reverse divergence",
                "measured": "the input has no history, the target has one",
                "shown_by": "which of the two arguments requires grad",
            }
        },
        repair="kl_div(log_softmax(student), softmax(teacher), reduction='batchmean')",
        explains=(*LEARNING, "finite"),
        source=f"{_DOCS}KLDivLoss.html",
    ),
    "mean_over_elements": _seen(
        proof="kl_div divides by all entries: its documentation advises batchmean",
        summary="kl_div(reduction='mean') divides by all {all} entries, not by the number of rows",
        measured="{classes} times less than the divergence of a row",
        shown_by="the reduction of the call",
        repair="reduction='batchmean' is the divergence as it is defined",
        source=f"{_DOCS}KLDivLoss.html",
    ),
    "broadcast": _seen(
        proof="both sides of a difference are broadcast to a larger shape",
        summary="{call} compares {left} with {right}: both are broadcast to {out}, every row with every other",
        measured="{pairs} differences instead of {rows}",
        shown_by="{how}",
        variants={
            "rows": {
                "summary": "{left} and {right} are broadcast to {out}: the loss compares every row with every other",
                "measured": "{pairs} pairs instead of {rows}",
            },
            "values": {
                "summary": (
                    "{call} is asked for values of shape {left}, and its distributions have {right}: both are "
                    "broadcast to {out}, every row with every other"
                ),
                "measured": "{pairs} log-probabilities instead of {rows}",
                "shown_by": "the shapes of the call; {how}",
                "repair": "squeeze(-1) the parameters, or unsqueeze(-1) the value, so that both have one shape",
            },
            "predictions": {
                "summary": (
                    "{call} compares predictions of shape {left} with targets of shape {right}: each prediction is "
                    "compared with {times} targets, and learns their mean"
                ),
                "measured": "{pairs} differences of {rows} predictions",
                "repair": (
                    "find what gave the targets more entries: sum log_prob over the actions (.sum(-1)), or predict one "
                    "value for each"
                ),
            },
            "products": {
                "summary": (
                    "{left} and {right} are multiplied to {out}: the {what} of each row are multiplied with those of "
                    "every other row"
                ),
                "measured": "{pairs} products instead of {rows}",
                "repair": "bring both to one shape: squeeze(-1) what has the shape ({rows}, 1)",
            },
            "table": {
                "summary": (
                    "{call} compares every box with every other, and all {pairs} results count equally: each "
                    "prediction is pulled to all targets"
                ),
                "measured": "{pairs} results instead of {rows}",
                "shown_by": "the gradient of what is backpropagated with respect to each of them is the same",
                "repair": "torch.diag(...) of the table, or the loss of matched pairs (generalized_box_iou_loss)",
            },
        },
        repair="squeeze(-1) the output, or unsqueeze(-1) the target, so that both have one shape",
        explains=(*LEARNING, "batch_independence"),
        source="https://github.com/pytorch/pytorch/issues/16045",
    ),
    "weight_shape": _learns(
        proof="a weight makes the loss larger than its input, or does not have one entry for each class",
        summary="{name} of shape {other} is broadcast against {shape} to {out}: each entry weighs every row",
        measured="{pairs} terms instead of {rows}",
        shown_by="{how}",
        variants={
            "classes": {
                "summary": "{call} has {count} classes and is given a weight that does not have one entry for each",
                "measured": "",
                "shown_by": "torch raised: {error}",
            }
        },
        repair="give one weight for each class, or the shape of the input",
        source=f"{_DOCS}BCEWithLogitsLoss.html",
    ),
    "log_variance": _seen(
        proof="the output of a layer, or negative values, are given for a variance",
        summary="{call} expects a variance, and is given {what}",
        measured="var in {var}",
        shown_by="{how}",
        repair="give exp(log_variance), or softplus of the output",
        explains=(*LEARNING, "finite", "loss_formula:parameter_confused"),
        source=f"{_DOCS}GaussianNLLLoss.html",
    ),
    "deviation_for_variance": _seen(
        proof="what is given as the variance comes from std or sqrt, or is called a deviation",
        summary="{call} expects a variance, and is given {what}: a standard deviation",
        measured="var in {var}",
        shown_by="{how}",
        repair="square it: var=sigma ** 2",
        explains=("loss_formula:parameter_confused",),
        source=f"{_DOCS}GaussianNLLLoss.html",
    ),
    "rate_scale": _seen(
        proof=(
            "a rate is given where its logarithm is taken, or negative values for a rate; or rates above 1 only, for "
            "counts below"
        ),
        summary="{call} takes the logarithm of the rate, and is given the rate: the result of {op}",
        shown_by="its input comes from {op}, and log_input is True",
        variants={
            "below": {
                "summary": "{call} with log_input=False is given rates below 0, down to {low}",
                "shown_by": "the values of its input",
                "repair": "leave log_input at True, or give exp or softplus of the scores",
            },
            "above": {
                "summary": (
                    "{call} takes the logarithm of the rate, and is given numbers above 0 only{made}: the rates are "
                    "above 1, and the counts are {mean} on average"
                ),
                "measured": "input in {input}: rates from {least}",
                "shown_by": "the best constant is the logarithm of {mean}, which is below 0",
                "repair": "pass log_input=False, or give the scores as they are",
            },
        },
        repair="give scores with log_input=True, or exp or softplus of them with log_input=False",
        explains=(*LEARNING, "finite"),
        source=f"{_DOCS}PoissonNLLLoss.html",
    ),
    "sign_flipped": _seen(
        proof="a negative multiple of the loss, and nothing else, is backpropagated and trains its scores",
        summary="{call} {why}",
        measured="{call} {loss}, backpropagated {root}",
        shown_by=(
            "the gradient of what is backpropagated with respect to it{alone:?, and their values: no other term is in "
            "it|}"
        ),
        repair="leave the minus out",
        explains=(*LEARNING, "loss_formula:sign_flipped"),
        source="https://github.com/MrSyee/pg-is-all-you-need/issues/37",
    ),
    "part_detached": _seen(
        proof="the value of a loss is added to what is backpropagated, without its history",
        summary="{names} {names:are} added to the loss as a number: the value counts, but no gradient flows through it",
        measured="in {passes} of {passes:backward pass}",
        shown_by="the backpropagated sum contains its value without a graph, and another loss with one",
        repair="add the loss itself, without detach() and outside of no_grad()",
        explains=(*LEARNING, "every_term_trains:term_detached"),
        source="https://github.com/myscience/open-genie/issues/6",
    ),
    "part_left_out": _learns(
        change=("overwritten", "seen"),
        proof="no gradient of the run reached a loss with a history, while others were backpropagated",
        summary="{call} is computed, but no loss that is backpropagated contains it",
        measured="no gradient reaches it; in {calls} of {calls} calls",
        shown_by="no gradient reached its value, and others did",
        variants={
            "layer": {
                "summary": (
                    "{call} is computed, but no loss that is backpropagated contains it: no other loss trains {layer}"
                ),
                "shown_by": (
                    "no gradient reached its value, and others did; an optimizer holds the layer, and no gradient of "
                    "the run reached it{lost:?; {lost}|}"
                ),
                "repair": "add it to the loss",
            },
            "lost": {
                "summary": "{call} is computed, but no loss that is backpropagated contains it: {lost}",
                "shown_by": "no gradient reached its value, and others did; {lost}",
                "repair": "add it to the loss, or delete the line",
            },
        },
        repair="add it to the loss; where it is only logged, compute it under no_grad(), which settles it",
        source="https://github.com/mims-harvard/TFC-pretraining/issues/37",
    ),
    "box_format": _seen(
        proof="boxes that are read as corners have x2 < x1, or are compared elsewhere with centres and sizes",
        summary=(
            "{count} of {all} {whose} boxes given to {call} have x2 < x1 or y2 < y1: it reads them as corners"
            "{sizes:?, and as centre, width and height all of them are boxes|}"
        ),
        measured="{name} {seen}, read as (x1, y1, x2, y2)",
        shown_by="{how}",
        variants={
            "two": {
                "summary": (
                    "{call} reads the predicted boxes as corners, and another loss reads the same boxes as {fmt}: one "
                    "is wrong"
                ),
                "measured": "targets {here} here, {there} at {place}",
                "shown_by": "the targets there, converted from {fmt} to corners, are the targets given here",
            }
        },
        repair="box_convert(boxes, in_fmt='cxcywh', out_fmt='xyxy') on both predictions and targets",
        explains=(*LEARNING, "loss_formula:box_format"),
        source="https://github.com/stevebottos/owl-vit-object-detection/issues/14",
    ),
    "criterion_not_trained": Cause(
        proof="the weights of a loss with weights get gradients, and no step changes them",
        summary="{call} has weights of its own ({weights}), and no optimizer step changes them",
        shown_by="they get gradients, and are the same after {steps:optimizer step}",
        repair="torch.optim.Adam([*model.parameters(), *criterion.parameters()]), or an optimizer of their own",
        explains=("optimizer_holds_every_param:not_in_optimizer",),
        change=("optimizer", "seen"),
        source="https://kevinmusgrave.github.io/pytorch-metric-learning/losses/",
    ),
    "value_range": _seen(
        proof="the images span less than a hundredth, or more than a hundred times, of the declared range",
        summary="{call} expects images in a range of {upper}, and is given images in {seen}",
        measured="the values go up to {high}",
        shown_by="the constants that are added in its fractions grow with the range",
        repair="pass the range that the images have: 1 for [0, 1], 255 for bytes",
        explains=(*LEARNING, "loss_formula:scores_as_probabilities"),
        source="https://github.com/VainF/pytorch-msssim",
    ),
}

CAUSES = _OF_INPUTS | OF_TARGETS
found = finding_maker(CAUSES)

OF_EVERY_CALL = frozenset("call input var shape loss error flags numbers source".split())
"""Facts that ``LossCall.finds`` adds to those of the rule: any text may name them."""

IN_EVERY_CALL = frozenset(
    """target_not_distribution index_list_expected signs_expected log_target_mismatch arguments_swapped
    class_without_weight deviation_for_variance no_pairs value_range head_too_wide classes_imbalanced sign_flipped
    logits_as_log_probabilities probabilities_as_log_probabilities temperature_inverted""".split()
)
"""Causes that count only where they are found in every call from the same line."""
