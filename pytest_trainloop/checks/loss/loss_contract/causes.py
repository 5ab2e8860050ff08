"""The causes of ``loss_contract``."""

from __future__ import annotations

from pytest_trainloop.registry import Cause

LEARNING = ("loss_at_init", "overfit_one_batch", "update_ratio")

_NO_SLOPE = (
    "gradient_reaches_every_param:gradient_vanished",
    "gradient_reaches_every_param:dead_activation",
    "every_param_moves:not_updated",
)
"""What scores of a constant loss look like."""

CAUSES = {
    "probabilities_as_logits": Cause(
        proof="the scores come from a softmax or a sigmoid, or sum to 1 in every row of every call",
        repair="give the loss the scores as they are: it takes the log-softmax or the sigmoid itself",
        explains=(*LEARNING, *_NO_SLOPE, "loss_formula:probabilities_as_scores"),
        change=("layer", "seen"),
    ),
    "log_probabilities_as_logits": Cause(
        proof="the scores come from log_softmax: harmless to cross_entropy",
        repair="leave log_softmax out, or use nll_loss",
        change=("layer", "seen"),
    ),
    "activation_on_logits": Cause(
        proof="the scores come from a function without values on one side of zero, or of a narrow range",
        repair="leave the activation out after the last layer",
        explains=(*LEARNING, *_NO_SLOPE),
        change=("layer", "seen"),
    ),
    "dropout_on_logits": Cause(
        proof="dropout lies between the last layer and the loss",
        repair="put the dropout before the last layer",
        explains=LEARNING,
        change=("layer", "seen"),
    ),
    "temperature_inverted": Cause(
        proof="dot products of unit vectors times less than one half, or distillation with scores times more than 1",
        repair="divide by the temperature",
        explains=LEARNING,
        change=("seen",),
    ),
    "single_class": Cause(
        proof="the last layer has one output, and its softmax is always 1",
        repair="give the head one output for each class, or use binary_cross_entropy_with_logits",
        explains=(*LEARNING, *_NO_SLOPE),
        change=("module", "seen"),
    ),
    "wrong_axis": Cause(
        proof="the softmax runs over another axis than the one that the loss takes for the classes",
        repair="normalise along the axis of the classes: dim=1 for (N, C, ...), dim=-1 for (N, T, C)",
        explains=(*LEARNING, "batch_independence", "loss_formula:wrong_axes"),
        change=("seen",),
    ),
    "class_axis": Cause(
        proof="the entries along the class axis come from several positions of the last layer",
        repair="transpose(1, 2) (or permute) brings the classes to axis 1; or flatten(0, 1) with flattened targets",
        explains=(*LEARNING, "batch_independence"),
        change=("seen",),
    ),
    "logits_as_log_probabilities": Cause(
        proof="the exponentials of the input sum to more than 1, or it is the output of a layer",
        repair="use cross_entropy, or log_softmax along the class axis first",
        explains=(*LEARNING, "finite"),
        change=("seen",),
    ),
    "probabilities_as_log_probabilities": Cause(
        proof="the input sums to 1, where its logarithm should",
        repair="give log_softmax of the scores",
        explains=LEARNING,
        change=("seen",),
    ),
    "logits_as_probabilities": Cause(
        proof="raw scores where a binary cross entropy or a divergence takes probabilities",
        repair="use binary_cross_entropy_with_logits on the scores as they are",
        explains=(*LEARNING, "finite", "loss_formula:scores_as_probabilities"),
        change=("seen",),
    ),
    "probabilities_saturated": Cause(
        proof="at the first call probabilities are exactly 0 or 1 and wrong, so their gradient is 0; a fault before "
        "the first optimizer step",
        repair="use binary_cross_entropy_with_logits, which keeps the gradient; look at the size of the scores",
        explains=(*LEARNING, *_NO_SLOPE),
        change=("seen",),
    ),
    "target_dtype": Cause(
        proof="torch raises for the dtype of the targets",
        repair="cast the target: target.long() for class indices, else target.to(output.dtype)",
        explains=LEARNING,
        change=("seen",),
    ),
    "target_shape": Cause(
        proof="torch raises for the shape of the targets",
        repair="squeeze(-1) the output, or unsqueeze(-1) the target",
        explains=LEARNING,
        change=("seen",),
    ),
    "target_out_of_range": Cause(
        proof="labels below 0 or beyond the last class, or counts below 0",
        repair="remap labels to 0 ... C-1, or widen the head",
        explains=LEARNING,
        change=("seen",),
    ),
    "target_outside_unit": Cause(
        proof="targets of a binary loss below 0 or above 1, where they count",
        repair="bring targets to [0, 1]; for other values use mse_loss",
        explains=(*LEARNING, "finite"),
        change=("seen",),
    ),
    "target_not_distribution": Cause(
        proof="soft targets with negative entries, or with sums that differ from 1 in a regular way",
        repair="take softmax along the class axis of scores; smooth labels as y * (1 - e) + e / C",
        explains=(*LEARNING, "batch_independence"),
        change=("seen",),
    ),
    "all_ignored": Cause(
        proof="every target of a call is the ignored one, and the mean is over none",
        repair="look why no target of the batch counts: truncated before its labels, or labels that are all masked\n"
        "where other batches have labels: sum the losses, and divide by max(1, count)",
        explains=(*LEARNING, "finite"),
        change=("seen",),
    ),
    "index_list_expected": Cause(
        proof="zeros and ones where lists of class indices are read",
        repair="list the classes and fill up with -1; for zeros and ones use multilabel_soft_margin_loss",
        explains=LEARNING,
        change=("seen",),
    ),
    "signs_expected": Cause(
        proof="targets of 0 and 1 where 1 and -1 are read",
        repair="map the labels: 2 * y - 1",
        explains=(*LEARNING, "loss_formula:labels_as_signs"),
        change=("seen",),
    ),
    "log_target_mismatch": Cause(
        proof="logarithms as targets without log_target, or probabilities with it",
        repair="pass log_target=True, or give exp() of it",
        explains=(*LEARNING, "finite"),
        change=("seen",),
    ),
    "arguments_swapped": Cause(
        proof="the first argument holds probabilities and the second logarithms",
        repair="kl_div(log_softmax(student), softmax(teacher), reduction='batchmean')",
        explains=(*LEARNING, "finite"),
        change=("seen",),
    ),
    "mean_over_elements": Cause(
        proof="kl_div divides by all entries: its documentation advises batchmean",
        repair="reduction='batchmean' is the divergence as it is defined",
        change=("seen",),
    ),
    "broadcast": Cause(
        proof="both sides of a difference are broadcast to a larger shape",
        repair="squeeze(-1) the output, or unsqueeze(-1) the target, so that both have one shape",
        explains=(*LEARNING, "batch_independence"),
        change=("seen",),
    ),
    "weight_shape": Cause(
        proof="a weight makes the loss larger than its input, or does not have one entry for each class",
        repair="give one weight for each class, or the shape of the input",
        explains=LEARNING,
        change=("seen",),
    ),
    "log_variance": Cause(
        proof="the output of a layer, or negative values, are given for a variance",
        repair="give exp(log_variance), or softplus of the output",
        explains=(*LEARNING, "finite", "loss_formula:parameter_confused"),
        change=("seen",),
    ),
    "class_without_weight": Cause(
        proof="a class that occurs has weight 0, and all others have whole numbers, or only one class costs anything",
        repair="divide as floats: total / (classes * counts)",
        explains=(*LEARNING, "every_row_teaches:class_costs_a_constant", "every_row_teaches:rows_left_out"),
        change=("seen",),
    ),
    "deviation_for_variance": Cause(
        proof="what is given as the variance comes from std or sqrt, or is called a deviation",
        repair="square it: var=sigma ** 2",
        change=("seen",),
        explains=("loss_formula:parameter_confused",),
    ),
    "rate_scale": Cause(
        proof="a rate is given where its logarithm is taken, or negative values for a rate; or rates above 1 only, for "
        "counts below",
        repair="give scores with log_input=True, or exp or softplus of them with log_input=False",
        explains=(*LEARNING, "finite"),
        change=("seen",),
    ),
    "blank_in_targets": Cause(
        proof="the labels of a CTC loss contain the blank",
        repair="number the labels without the blank, or give another blank=",
        explains=LEARNING,
        change=("seen",),
    ),
    "lengths_refused": Cause(
        proof="torch raises for the lengths given to a CTC loss",
        repair="input_lengths count frames of the log-probabilities (after downsampling), target_lengths labels",
        explains=LEARNING,
        change=("seen",),
    ),
    "alignment_impossible": Cause(
        proof="a target of a CTC loss has more labels than its input has frames",
        repair="give the lengths after the model as input_lengths, without padding as target_lengths; where the model "
        "itself leaves too few frames, use fewer downsampling steps",
        explains=(*LEARNING, "finite"),
        change=("seen",),
    ),
    "padding_counted": Cause(
        proof="positions that are padding in the input get a gradient from the loss, all with one label where padding "
        "is not declared",
        repair="label padded positions with ignore_index, or leave them out of the mean",
        explains=(*LEARNING, "padding_invariance"),
        change=("seen",),
    ),
    "labels_misplaced": Cause(
        proof="some rows have labels at padded positions, and others none at their last real ones",
        repair="sort, shuffle and pad whole examples, and take their fields apart after it: rows = sorted(rows, "
        "key=...)",
        do_not="mask the labels at padded positions: real positions would keep the labels of other rows",
        explains=(*LEARNING, "padding_invariance"),
        change=("seen",),
    ),
    "ignore_index_mismatch": Cause(
        proof="padded positions of one label count, and another label is ignored",
        repair="pass the label of padded positions as ignore_index",
        explains=(*LEARNING, "padding_invariance"),
        change=("seen",),
    ),
    "real_class_ignored": Cause(
        proof="a label of real positions is the ignored one",
        repair="label padding -100, the default of ignore_index, so that every class is learned",
        change=("seen",),
    ),
    "shifted_twice": Cause(
        proof="the labels of a causal model are the inputs two positions ahead",
        repair="compare the output at t with the token at t + 1, shifting once: in the data, or in the loss",
        explains=LEARNING,
        change=("seen",),
    ),
    "not_shifted": Cause(
        proof="the labels of a causal model are the inputs of the same position, or of the previous one",
        repair="compare the output at t with the token at t + 1, shifting once: in the data, or in the loss",
        explains=LEARNING,
        change=("seen",),
    ),
    "ids_out_of_range": Cause(
        proof="ids beyond the rows of an embedding",
        repair="resize the embedding to the tokenizer (resize_token_embeddings), or map the ids",
        explains=LEARNING,
        change=("module", "seen"),
    ),
    "sign_flipped": Cause(
        proof="a negative multiple of the loss, and nothing else, is backpropagated and trains its scores",
        repair="leave the minus out",
        explains=(*LEARNING, "loss_formula:sign_flipped"),
        change=("seen",),
    ),
    "part_detached": Cause(
        proof="the value of a loss is added to what is backpropagated, without its history",
        repair="add the loss itself, without detach() and outside of no_grad()",
        explains=(*LEARNING, "every_term_trains:term_detached"),
        change=("seen",),
    ),
    "part_left_out": Cause(
        proof="no gradient of the run reached a loss with a history, while others were backpropagated",
        repair="add it to the loss; where it is only logged, compute it under no_grad(), which settles it",
        explains=LEARNING,
        change=("seen",),
    ),
    "sides_turned": Cause(
        proof="in every row the score of what the batch names negative is raised, and that of the positive lowered",
        repair="softplus(negative - positive), or -logsigmoid(positive - negative)",
        explains=LEARNING,
        change=("seen",),
    ),
    "box_format": Cause(
        proof="boxes that are read as corners have x2 < x1, or are compared elsewhere with centres and sizes",
        repair="box_convert(boxes, in_fmt='cxcywh', out_fmt='xyxy') on predictions and targets alike",
        explains=(*LEARNING, "loss_formula:box_format"),
        change=("seen",),
    ),
    "no_pairs": Cause(
        proof="the labels of every call are all different, or all the same, and the loss is exactly 0",
        repair="sample several rows of each class, or give both views of a row one label",
        explains=(*LEARNING, *_NO_SLOPE),
        change=("seen",),
    ),
    "criterion_not_trained": Cause(
        proof="the weights of a loss with weights get gradients, and no step changes them",
        repair="give its parameters to the optimizer, beside those of the model",
        explains=("optimizer_holds_every_param:not_in_optimizer",),
        change=("optimizer", "seen"),
    ),
    "value_range": Cause(
        proof="the images take less than a hundredth, or more than a hundred times, of the range that the call is told",
        repair="pass the range that the images have: 1 for [0, 1], 255 for bytes",
        explains=(*LEARNING, "loss_formula:scores_as_probabilities"),
        change=("seen",),
    ),
    "head_too_wide": Cause(
        proof="no label of the run lies in the lower eighth of the head",
        repair="size the head by the labels, or look at the mapping from names to labels",
        change=("module", "seen"),
        settle="batches= with the project's own labels show whether the others occur",
    ),
    "classes_imbalanced": Cause(
        proof="fewer than 5 % of the labels are positive, without a weight",
        repair="give pos_weight=negatives / positives",
        change=("seen",),
    ),
}
