"""The causes of ``loss_contract``: what proves each, and what repairs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.registry import Cause

if TYPE_CHECKING:
    from pytest_trainloop.registry import Part

LEARNING = ("loss_at_init", "overfit_one_batch", "update_ratio")
_NO_SLOPE = (
    "gradient_reaches_every_param:gradient_vanished",
    "gradient_reaches_every_param:dead_activation",
    "every_param_moves:not_updated",
)
"""What scores of a constant loss look like."""


def _cause(
    proof: str,
    repair: str,
    *explains: str,
    learning: bool = True,
    change: tuple[Part, ...] = ("seen",),
    settle: str = "",
) -> Cause:
    explains = (*(LEARNING if learning else ()), *explains)
    return Cause(proof=proof, repair=repair, explains=explains, change=change, settle=settle)


# fmt: off
CAUSES = {
    "probabilities_as_logits": _cause(
        "the scores come from a softmax or a sigmoid, or sum to 1 in every row of every call",
        "give the loss the scores as they are: it takes the log-softmax or the sigmoid itself",
        *_NO_SLOPE, "loss_formula:probabilities_as_scores", change=("layer", "seen"),
    ),
    "log_probabilities_as_logits": _cause(
        "the scores come from log_softmax: harmless to cross_entropy",
        "leave log_softmax out, or use nll_loss",
        learning=False, change=("layer", "seen"),
    ),
    "activation_on_logits": _cause(
        "the scores come from a function without values on one side of zero, or of a narrow range",
        "leave the activation out after the last layer",
        *_NO_SLOPE, change=("layer", "seen"),
    ),
    "dropout_on_logits": _cause(
        "dropout lies between the last layer and the loss",
        "put the dropout before the last layer",
        change=("layer", "seen"),
    ),
    "temperature_inverted": _cause(
        "dot products of unit vectors times less than one half, or distillation with scores times more than 1",
        "divide by the temperature",
    ),
    "single_class": _cause(
        "the last layer has one output, and its softmax is always 1",
        "give the head one output for each class, or use binary_cross_entropy_with_logits",
        *_NO_SLOPE, change=("module", "seen"),
    ),
    "wrong_axis": _cause(
        "the softmax runs over another axis than the one that the loss takes for the classes",
        "normalise along the axis of the classes: dim=1 for (N, C, ...), dim=-1 for (N, T, C)",
        "batch_independence", "loss_formula:wrong_axes",
    ),
    "class_axis": _cause(
        "the entries along the class axis come from several positions of the last layer",
        "transpose(1, 2) (or permute) brings the classes to axis 1; or flatten(0, 1) with flattened targets",
        "batch_independence",
    ),
    "logits_as_log_probabilities": _cause(
        "the exponentials of the input sum to more than 1, or it is the output of a layer",
        "use cross_entropy, or log_softmax along the class axis first",
        "finite",
    ),
    "probabilities_as_log_probabilities": _cause(
        "the input sums to 1, where its logarithm should",
        "give log_softmax of the scores",
    ),
    "logits_as_probabilities": _cause(
        "raw scores where a binary cross entropy or a divergence takes probabilities",
        "use binary_cross_entropy_with_logits on the scores as they are",
        "finite", "loss_formula:scores_as_probabilities",
    ),
    "probabilities_saturated": _cause(
        "before the first step probabilities are exactly 0 or 1 and wrong, so their gradient is 0",
        "use binary_cross_entropy_with_logits, which keeps the gradient; look at the size of the scores",
        *_NO_SLOPE,
    ),
    "target_dtype": _cause(
        "torch raises for the dtype of the targets",
        "cast the target: target.long() for class indices, else target.to(output.dtype)",
    ),
    "target_shape": _cause(
        "torch raises for the shape of the targets",
        "squeeze(-1) the output, or unsqueeze(-1) the target",
    ),
    "target_out_of_range": _cause(
        "labels below 0 or beyond the last class, or counts below 0",
        "remap labels to 0 ... C-1, or widen the head",
    ),
    "target_outside_unit": _cause(
        "targets of a binary loss below 0 or above 1, where they count",
        "bring targets to [0, 1]; for other values use mse_loss",
        "finite",
    ),
    "target_not_distribution": _cause(
        "soft targets with negative entries, or with sums that differ from 1 in a regular way",
        "take softmax along the class axis of scores; smooth labels as y * (1 - e) + e / C",
        "batch_independence",
    ),
    "all_ignored": _cause(
        "every target of a call is the ignored one, and the mean is over none",
        "leave such a batch out explicitly, or sum the losses and divide by max(1, count)",
        "finite",
    ),
    "index_list_expected": _cause(
        "zeros and ones where lists of class indices are read",
        "list the classes and fill up with -1; for zeros and ones use multilabel_soft_margin_loss",
    ),
    "signs_expected": _cause(
        "targets of 0 and 1 where 1 and -1 are read",
        "map the labels: 2 * y - 1",
        "loss_formula:labels_as_signs",
    ),
    "log_target_mismatch": _cause(
        "logarithms as targets without log_target, or probabilities with it",
        "pass log_target=True, or give exp() of it",
        "finite",
    ),
    "arguments_swapped": _cause(
        "the first argument holds probabilities and the second logarithms",
        "kl_div(log_softmax(student), softmax(teacher), reduction='batchmean')",
        "finite",
    ),
    "mean_over_elements": _cause(
        "kl_div divides by all entries: its documentation advises batchmean",
        "reduction='batchmean' is the divergence as it is defined",
        learning=False,
    ),
    "broadcast": _cause(
        "both sides of a difference are broadcast to a larger shape",
        "squeeze(-1) the output, or unsqueeze(-1) the target, so that both have one shape",
        "batch_independence",
    ),
    "weight_shape": _cause(
        "a weight makes the loss larger than its input, or does not have one entry for each class",
        "give one weight for each class, or the shape of the input",
    ),
    "log_variance": _cause(
        "the output of a layer, or negative values, are given for a variance",
        "give exp(log_variance), or softplus of the output",
        "finite", "loss_formula:parameter_confused",
    ),
    "class_without_weight": _cause(
        "a class that occurs has weight 0, and all others have whole numbers, or only one class costs anything",
        "divide as floats: total / (classes * counts)",
        "every_row_teaches:class_costs_a_constant", "every_row_teaches:rows_left_out",
    ),
    "deviation_for_variance": _cause(
        "what is given as the variance comes from std or sqrt, or is called a deviation",
        "square it: var=sigma ** 2",
        "loss_formula:parameter_confused", learning=False,
    ),
    "rate_scale": _cause(
        "a rate is given where its logarithm is taken, or negative values for a rate; or rates above 1 only, for "
        "counts below",
        "give scores with log_input=True, or exp or softplus of them with log_input=False",
        "finite",
    ),
    "blank_in_targets": _cause(
        "the labels of a CTC loss contain the blank",
        "number the labels without the blank, or give another blank=",
    ),
    "lengths_refused": _cause(
        "torch raises for the lengths given to a CTC loss",
        "input_lengths count frames of the log-probabilities (after downsampling), target_lengths labels",
    ),
    "alignment_impossible": _cause(
        "a target of a CTC loss has more labels than its input has frames",
        "give the lengths after the model as input_lengths, without padding as target_lengths; where the model "
        "itself leaves too few frames, use fewer downsampling steps",
        "finite",
    ),
    "padding_counted": _cause(
        "positions that are padding in the input count in the loss, all with one label where padding is not "
        "declared",
        "label padded positions with ignore_index, or leave them out of the mean",
        "padding_invariance",
    ),
    "ignore_index_mismatch": _cause(
        "padded positions of one label count, and another label is ignored",
        "pass the label of padded positions as ignore_index",
        "padding_invariance",
    ),
    "real_class_ignored": _cause(
        "a label of real positions is the ignored one",
        "label padding -100, the default of ignore_index, so that every class is learned",
        learning=False,
    ),
    "shifted_twice": _cause(
        "the labels of a causal model are the inputs two positions ahead",
        "compare the output at t with the token at t + 1, shifting once: in the data, or in the loss",
    ),
    "not_shifted": _cause(
        "the labels of a causal model are the inputs of the same position, or of the previous one",
        "compare the output at t with the token at t + 1, shifting once: in the data, or in the loss",
    ),
    "ids_out_of_range": _cause(
        "ids beyond the rows of an embedding",
        "resize the embedding to the tokenizer (resize_token_embeddings), or map the ids",
        change=("module", "seen"),
    ),
    "sign_flipped": _cause(
        "a negative multiple of the loss, and nothing else, is backpropagated and trains its scores",
        "leave the minus out",
        "loss_formula:sign_flipped",
    ),
    "part_detached": _cause(
        "the value of a loss is added to what is backpropagated, without its history",
        "add the loss itself, without detach() and outside of no_grad()",
        "every_term_trains:term_detached",
    ),
    "part_left_out": _cause(
        "no gradient ever reached a loss with a history, while others were backpropagated",
        "add it to the loss; where it is only logged, compute it under no_grad(), which settles it",
    ),
    "sides_turned": _cause(
        "in every row the score of what the batch names negative is raised, and that of the positive lowered",
        "softplus(negative - positive), or -logsigmoid(positive - negative)",
    ),
    "box_format": _cause(
        "boxes that are read as corners have x2 < x1, or are compared elsewhere with centres and sizes",
        "box_convert(boxes, in_fmt='cxcywh', out_fmt='xyxy') on predictions and targets alike",
        "loss_formula:box_format",
    ),
    "no_pairs": _cause(
        "the labels of every call are all different, or all the same, and the loss is exactly 0",
        "sample several rows of each class, or give both views of a row one label",
        *_NO_SLOPE,
    ),
    "criterion_not_trained": _cause(
        "the weights of a loss with weights get gradients, and no step changes them",
        "give its parameters to the optimizer, beside those of the model",
        "optimizer_holds_every_param:not_in_optimizer", learning=False, change=("optimizer", "seen"),
    ),
    "value_range": _cause(
        "the images take less than a hundredth, or more than a hundred times, of the range that the call is told",
        "pass the range that the images have: 1 for [0, 1], 255 for bytes",
        "loss_formula:scores_as_probabilities",
    ),
    "head_too_wide": _cause(
        "no label of the run lies in the lower eighth of the head",
        "size the head by the labels, or look at the mapping from names to labels",
        learning=False, change=("module", "seen"), settle="batches= with the project's own labels show whether the others occur",
    ),
    "classes_imbalanced": _cause(
        "fewer than 5 % of the labels are positive, without a weight",
        "give pos_weight=negatives / positives",
        learning=False,
    ),
}
# fmt: on

# fmt: off
SAYS: dict[str, tuple[str, ...]] = {
    "probabilities_as_logits": (
        "probabilities given where logits are expected: {call} is given the result of {source}",
        "{least}", "{flags}only casts, reshapes and constant factors lie between"),
    "probabilities_as_logits/sums": (
        "probabilities given where logits are expected: {call} is given rows that sum to 1",
        "{least}", "in every call all entries are at least 0, and all rows sum to 1 to rounding"),
    "log_probabilities_as_logits": (
        "cross_entropy is given log-probabilities (of {source}): harmless, since their log-softmax is the same",),
    "activation_on_logits": (
        "{source} is applied to the scores given to {call}: {why}", "",
        "only casts, reshapes and constant factors lie between", "leave {op} out after the last layer; {otherwise}"),
    "activation_on_logits/clamp": (
        "the scores given to {call} are clamped at 0 from below: no class can be given a lower one", "",
        "a clamp lies between the last layer and the loss", "leave the clamp out; {otherwise}"),
    "dropout_on_logits": (
        "{source} is applied to the scores given to {call}: a dropped score is 0, which may be the largest",
        "dropout p={rate:g} on the output of the last layer"),
    "temperature_inverted/cosines": (
        "dot products of unit vectors are multiplied by {scale:g} before {call}: the temperature is a factor in place "
        "of a divisor",
        "all scores lie within {width:.3g} of each other",
        "the constants between the product and the loss multiply to {scale:g}",
        "scores / {scale:g}: divide by the temperature"),
    "temperature_inverted": (
        "both sides of {call} are softmaxes of scores multiplied by {scale:g}: the temperature is a factor in place of "
        "a divisor, and makes them sharper", "", "the constants between the last layers and the softmaxes",
        "divide the scores by the temperature: scores / {scale:g}"),
    "single_class": (
        "{call} over one class: its softmax is 1, whatever the model returns", "input of shape {shape}"),
    "wrong_axis": (
        "{source} normalises over axis {axis} of {shape}, which is not the axis of the classes that {call} reads",
        "normalised over {size} entries of axis {axis}", "it does not sum to 1 over the classes"),
    "wrong_axis/rows": (
        "the similarities given to {call} are of vectors normalised over the rows (dim=0), not each to length 1", "",
        "both factors of the product come from normalize(dim=0), and rows are compared", "normalize(x, dim=-1)"),
    "wrong_axis/examples": (
        "the input of kl_div is normalised over the examples",
        "the input sums to 1 along axis {mine}, the target along {theirs}", "the sums along each axis",
        "take both softmaxes along the class axis (dim=-1)"),
    "wrong_axis/sides": (
        "the two sides of {call} are distributions over different axes",
        "the input sums to 1 along axis {mine}, the target along {theirs}", "the sums along each axis",
        "take both softmaxes along the class axis: dim=1 for (N, C), dim=-1 for (N, T, C)"),
    "class_axis": (
        "{call} compares scores {what} along its class axis: {layer} was reshaped to {shape}, not transposed",
        "axis 1 of {shape} runs over entries of several positions of the last layer",
        "the same reshapes applied to the indices of the entries"),
    "class_axis/square": (
        "{call} takes axis 1 of {shape} for the classes, and the last layer gives them on axis 2",
        "{shape[1]} positions and {shape[2]} classes: torch accepts the shape because they are equal",
        "nothing was transposed between the last layer and the loss"),
    "class_axis/raised": (
        "{call} takes axis 1 of {shape} for the classes; the targets of {other} say that they are on the last axis",
        "", "torch raised: {error}"),
    "class_axis/steps": (
        "the steps that ctc_loss reads as one row come from several rows: {layer} was reshaped to {shape}, not "
        "transposed", "", "the same reshapes applied to the indices of the entries",
        "transpose(0, 1) brings (N, T, C) to (T, N, C)"),
    "logits_as_log_probabilities": ("raw scores given where log-probabilities are expected: {call}",),
    "probabilities_as_log_probabilities": ("probabilities given where log-probabilities are expected: {call}", "",
                                           "the entries of every row sum to 1"),
    "logits_as_probabilities": (
        "raw scores given where probabilities are expected: {call} is given the output of a layer{clamped}", "",
        "{flags}no sigmoid or softmax lies between the layer and the loss",
        "use binary_cross_entropy_with_logits, or give the sigmoid of them"),
    "logits_as_probabilities/raised": (
        "raw scores given where probabilities are expected: {call} takes {input}", "", "torch raised: {error}"),
    "logits_as_probabilities/teacher": (
        "kl_div is given raw scores as targets, down to {low:.4g}: it takes probabilities", "", "",
        "take the softmax of the teacher's scores"),
    "probabilities_saturated": (
        "{share:.0%} of the probabilities given to {call} are exactly 0 or 1 and wrong before the first step: their "
        "loss is limited to 100 and their gradient is 0", "{count} of {all} entries; input in {input}"),
    "target_dtype": ("{call} is given {have} targets, and takes {needed}", "", "torch raised: {error}", "{cast}"),
    "target_shape": ("{call} is given tensors that do not fit: {shapes}", "", "torch raised: {error}",
                     "give all of them one shape"),
    "target_shape/classes": (
        "{call} is given {hot}targets of shape {other} for scores of {shape}: it takes class indices of shape "
        "{expected}", "", "torch raised: {error}"),
    "target_shape/equal": (
        "{call} is given targets of shape {other} for an input of {shape}: the shapes must be equal", "",
        "torch raised: {error}"),
    "target_out_of_range": (
        "{call} is given labels {low} to {high} and has classes 0 to {last}{hint}", "labels seen {seen}", "{flags}{how}"),
    "target_out_of_range/counts": ("{call} is given targets below 0, down to {low:.4g}: counts are expected", "", "",
                                   "give the counts without standardising them"),
    "target_outside_unit": (
        "{reach}; {call} expects targets in [{low:g}, {high:g}], and has no lower bound for others",
        "{count} of {all} targets outside of [{low:g}, {high:g}]: {seen}",
        "{flags}the targets that count in the loss"),
    "target_not_distribution": (
        "the class probabilities given to {call} as targets do not sum to 1: {why}", "rows sum to {sums}",
        "sums along the class axis, beyond what rounding explains"),
    "target_not_distribution/twice": (
        "the targets of {call} are a softmax of a softmax: nearly the same for every class", "", "",
        "give the softmax of the teacher's scores, once"),
    "all_ignored": (
        "all {count} targets of a batch are {ignored}, which {call} ignores: a mean of none",
        "{count} of {count} targets ignored, loss NaN"),
    "index_list_expected": (
        "{call} is given zeros and ones, and reads lists of class indices that end with -1", "target {seen}",
        "no row holds -1, and the same indices repeat"),
    "signs_expected": ("{call} is given targets of 0: it expects 1 and -1", "{count} of {all} targets are 0: {seen}",
                       "the targets of every call"),
    "log_target_mismatch": (
        "kl_div is given targets below 0, down to {low:.4g}: log-probabilities need log_target=True",),
    "log_target_mismatch/shares": ("kl_div is given probabilities with log_target=True", "", "",
                                   "leave log_target out, or give the target's log_softmax"),
    "arguments_swapped": (
        "the arguments of kl_div are swapped: it takes log-probabilities first, then probabilities",),
    "arguments_swapped/reverse": (
        "the gradient of kl_div goes through the target only: this is the reverse divergence",),
    "mean_over_elements": (
        "kl_div(reduction='mean') divides by all {all} entries, not by the rows",
        "{count} times less than the divergence of a row"),
    "broadcast": (
        "{call} compares {left} with {right}: both are broadcast to {out}, every row with every other",
        "{pairs} differences where {rows} are meant", "{how}", "{otherwise}"),
    "broadcast/products": (
        "{left} and {right} are multiplied to {out}: each row's {what} are multiplied with those of every other row",
        "{pairs} products where {rows} are meant", "{how}",
        "bring both to one shape: squeeze(-1) what has the shape ({rows}, 1)"),
    "broadcast/table": (
        "{call} compares every box with every other, and all {pairs} results count alike: each prediction is pulled to "
        "all targets", "{pairs} results where {rows} are meant",
        "the gradient of what is backpropagated with respect to each of them is the same",
        "torch.diag(...) of the table, or the loss of matched pairs (generalized_box_iou_loss)"),
    "weight_shape": (
        "{name} of shape {other} is broadcast against {shape} to {out}: each entry weighs every row",
        "{pairs} terms where {rows} are meant", "{how}",
        "give {name} the shape of the input, or one entry for each class (its last axis)"),
    "weight_shape/classes": (
        "{call} has {count} classes and is given a weight that does not have one entry for each", "",
        "torch raised: {error}", "give one weight for each class, of shape ({count},)"),
    "log_variance": ("{call} takes a variance, and is given {what}", "var in {var}", "{how}"),
    "class_without_weight": (
        "{call} gives weight 0 to classes {idle}, which occur: {why}", "weights {seen}", "{how}",
        "where the weights are made: if they are divided with //, use /: total / (classes * counts)"),
    "class_without_weight/positives": (
        "pos_weight is 0 where {lost} targets are positive: they cost nothing, and the best answer is always no",
        "pos_weight in {seen}; {count} of {all} targets positive", "",
        "pos_weight=negatives / positives; // makes 0 of it where positives are the more"),
    "deviation_for_variance": ("{call} takes a variance, and is given {what}: a standard deviation", "var in {var}"),
    "rate_scale": (
        "{call} takes the logarithm of the rate, and is given the result of {op}: a rate", "",
        "its input comes from {op}, and log_input is True", "give the scores before {op}, or pass log_input=False"),
    "rate_scale/below": (
        "{call} with log_input=False is given rates below 0, down to {low:.4g}", "", "",
        "leave log_input at True, or give exp or softplus of the scores"),
    "rate_scale/above": (
        "{call} takes the logarithm of the rate, and is given numbers above 0 only{made}: rates above 1, for counts of "
        "{mean:.3g} in the mean", "", "the best constant is the logarithm of {mean:.3g}",
        "pass log_input=False, or give the scores as they are"),
    "blank_in_targets": (
        "{count} of {all} targets of ctc_loss hold {blank}, which is the blank", "target {seen} within its length", "",
        "number the labels without {blank}, or give another blank="),
    "lengths_refused": ("the lengths given to ctc_loss do not fit its input and targets", "", "torch raised: {error}"),
    "alignment_impossible": (
        "{count} of {all} targets of ctc_loss are longer than their inputs: no alignment exists, and {then}",
        "log_probs has {given} frames, input_lengths says {frames}, and {labels} labels need {needed}{blanks}"),
    "ids_out_of_range": ("the embedding{module} has rows 0 to {last} and is given ids {low} to {high}", "",
                         "torch raised: {error}"),
    "padding_counted/mean": (
        "the losses of {count} real positions are divided by all {all} positions",
        "{share:.0%} of the mean's positions are padding, with loss 0",
        "the gradient of what is backpropagated at each of them is 1 over the number of all",
        "divide by the number of real positions: (loss * mask).sum() / mask.sum()"),
    "padding_counted": (
        "{share:.0%} of the positions that count in {call} are padding", "{count} of {all} positions{losses}",
        "all of them hold the padding in the model's input, and {labels}"),
    "ignore_index_mismatch": (
        "{share:.0%} of the positions that count in {call} are padding: ignore_index is {ignored}, and padded positions "
        "are labelled {label:g}", "{count} of {all} positions{losses}",
        "all of them hold the padding in the model's input, and {labels}"),
    "real_class_ignored": (
        "{count} positions that are not padding have the label {ignored}, which {call} ignores{shared}",
        "{share:.0%} of the positions"),
    "sign_flipped": ("{call} {why}", "{call} {loss}, backpropagated {root:.4g}",
                     "the gradient of what is backpropagated with respect to it", "{otherwise}"),
    "box_format": (
        "{count} of {all} {whose} boxes given to {call} have x2 < x1 or y2 < y1: it reads them as corners{sizes}",
        "{name} {seen}, read as (x1, y1, x2, y2)"),
    "box_format/two": (
        "{call} compares predicted boxes with corners, and a distance compares the same ones with {fmt}: they cannot be "
        "both", "targets {here} here, {there} there",
        "the targets at {at}, converted from {fmt} to corners, are those given here",
        "convert the predictions as the targets are: box_convert(boxes, in_fmt='{fmt}', out_fmt='xyxy')"),
    "no_pairs": ("{call} has no {kind} pair: {alike}, and the loss is 0", "{kinds} different labels in {all} rows; loss 0"),
    "criterion_not_trained": (
        "{call} has weights of its own ({names}), and no step changes them", "", "",
        "torch.optim.Adam([*model.parameters(), *criterion.parameters()]), or an optimizer of their own"),
    "value_range": (
        "{call} is told a range of {upper:g}, and is given images in {seen}", "the values go up to {high:.4g}",
        "the constants that are added in its fractions grow with the range", "pass {name}={fits}"),
    "head_too_wide": (
        "the head is {times:.0f} times wider than the labels: {count} classes, and no label above {high}",
        "{count} classes for labels up to {high}: {times:.0f} times as many", "all targets of the recorded steps"),
    "classes_imbalanced": (
        "{share:.1%} of the labels given to {call} are positive, and no pos_weight is given",
        "{count} of {all} labels of a call", "the targets of every recorded call",
        "pos_weight=negatives / positives (here {ratio:.0f})"),
}
# fmt: on
"""What is said of a call: the summary, what was measured, what shows it, the repair, where these are not the cause's
own. A cause that is seen in several ways has a wording for each, behind a slash."""

IN_EVERY_CALL = frozenset(
    """target_not_distribution index_list_expected signs_expected log_target_mismatch arguments_swapped
    class_without_weight deviation_for_variance no_pairs value_range head_too_wide classes_imbalanced sign_flipped
    logits_as_log_probabilities probabilities_as_log_probabilities temperature_inverted""".split()
)
"""Causes that count only where they are found in every call from the same line."""
