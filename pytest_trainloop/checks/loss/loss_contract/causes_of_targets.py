"""The causes of ``loss_contract`` that lie in the targets, the labels, and the positions that count."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause

LEARNING = ("loss_at_init", "overfit_one_batch", "update_ratio")
NO_SLOPE = (
    "gradient_reaches_every_param:gradient_vanished",
    "gradient_reaches_every_param:dead_activation",
    "every_param_moves:not_updated",
)
"""What scores of a constant loss look like."""
_DOCS = "https://docs.pytorch.org/docs/stable/generated/torch.nn."

_seen = partial(Cause, change=("seen",))
_learns = partial(_seen, explains=LEARNING)
_target = partial(Cause, change=("data",), explains=LEARNING)
"""The target is to change: where it was made, and not where the loss reads it."""

OF_TARGETS = {
    "target_dtype": _learns(
        proof="torch raises for the dtype of the targets",
        summary="{call} is given {have} targets, and takes {needed}",
        shown_by="torch raised: {error}",
        repair="cast the target: target.long() for class indices, else target.to(output.dtype)",
        source=f"{_DOCS}CrossEntropyLoss.html",
    ),
    "target_shape": _learns(
        proof="torch raises for the shape of the targets",
        summary="{call} is given tensors whose shapes do not fit: {shapes}",
        shown_by="torch raised: {error}",
        variants={
            "classes": {
                "summary": (
                    "{call} is given {hot:?one-hot |}targets of shape {other} for scores of {shape}: it takes class "
                    "indices of shape {expected}"
                ),
            },
            "equal": {
                "summary": (
                    "{call} is given targets of shape {other} for an input of {shape}: the two shapes must be equal"
                ),
            },
        },
        repair="squeeze(-1) the output, or unsqueeze(-1) the target",
        source=f"{_DOCS}CrossEntropyLoss.html",
    ),
    "target_out_of_range": _target(
        proof="labels below 0 or beyond the last class, or counts below 0",
        summary="{call} is given labels {low} to {high} and has classes 0 to {last}{hint}",
        measured="labels seen {seen}",
        shown_by="{flags}{how}",
        variants={
            "counts": {
                "summary": "{call} expects counts as targets, and is given values below 0, down to {low}",
                "measured": "",
                "shown_by": "the values of the target",
                "repair": "give the counts without standardising them",
            }
        },
        repair="remap labels to 0 ... C-1, or widen the head",
        source="https://github.com/pytorch/pytorch/issues/15508",
    ),
    "target_outside_unit": _target(
        proof="targets of a binary loss below 0 or above 1, where they count",
        summary="{reach}; {call} expects targets in [{low}, {high}]{bounded:?|, and has no lower bound for others}",
        measured="{count} of {all} targets outside of [{low}, {high}]: {seen}",
        shown_by="{flags}the targets that count in the loss",
        repair="bring targets to [0, 1]; for other values use mse_loss",
        explains=(*LEARNING, "finite"),
        source=f"{_DOCS}BCEWithLogitsLoss.html",
    ),
    "target_not_distribution": _target(
        proof="soft targets with negative entries, or with sums that differ from 1 in a regular way",
        summary="the class probabilities given to {call} as targets do not sum to 1: {why}",
        measured="rows sum to {sums}",
        shown_by="sums along the class axis, beyond what rounding explains",
        variants={
            "twice": {
                "summary": "the targets of {call} are a softmax of a softmax: nearly the same for every class",
                "measured": "",
                "shown_by": "the operations that the target was computed by",
                "repair": "give the softmax of the teacher's scores, once",
            }
        },
        repair="take softmax along the class axis of scores; smooth labels as y * (1 - e) + e / C",
        explains=(*LEARNING, "batch_independence"),
        source=f"{_DOCS}CrossEntropyLoss.html",
    ),
    "all_ignored": _learns(
        proof="every target of a call is the ignored one, and the mean is over none",
        summary="all {all} targets of a batch are {ignored}, which {call} ignores: the mean of no values is NaN",
        measured="{all} of {all} targets ignored, loss NaN",
        shown_by="every target equals ignore_index, and reduction is mean",
        repair=(
            "look why no target of the batch counts: truncated before its labels, or labels that are all masked\n"
            "where other batches have labels: sum the losses, and divide by max(1, count)"
        ),
        explains=(*LEARNING, "finite"),
        source="https://github.com/pytorch/pytorch/issues/70348",
    ),
    "index_list_expected": _target(
        proof="zeros and ones where lists of class indices are read",
        summary="{call} reads lists of class indices that end with -1, and is given zeros and ones",
        measured="target {seen}",
        shown_by="no row holds -1, and the same indices repeat",
        repair="list the classes and fill up with -1; for zeros and ones use multilabel_soft_margin_loss",
        source=f"{_DOCS}MultiLabelMarginLoss.html",
    ),
    "signs_expected": _learns(
        proof="targets of 0 and 1 where 1 and -1 are read",
        summary="{call} is given targets of 0: it expects 1 and -1",
        measured="{count} of {all} targets are 0: {seen}",
        shown_by="the targets of every call",
        repair="map the labels: 2 * y - 1",
        explains=(*LEARNING, "loss_formula:labels_as_signs"),
        source=f"{_DOCS}SoftMarginLoss.html",
    ),
    "log_target_mismatch": _seen(
        proof="logarithms as targets without log_target, or probabilities with it",
        summary="kl_div is given targets below 0, down to {low}: log-probabilities need log_target=True",
        shown_by="the values of the target",
        variants={
            "shares": {
                "summary": "kl_div is given probabilities with log_target=True",
                "shown_by": "the target's rows sum to 1",
                "repair": "leave log_target out, or give the target's log_softmax",
            }
        },
        repair="pass log_target=True, or give exp() of it",
        explains=(*LEARNING, "finite"),
        source=f"{_DOCS}KLDivLoss.html",
    ),
    "class_without_weight": _seen(
        change=("class weights", "seen"),
        proof="a class that occurs has weight 0, and all others have whole numbers, or only one class costs anything",
        summary=(
            "{call} gives weight 0 to classes {idle}, which occur: {only:?only class {only} costs anything, so that "
            "always answering {only} is best|their rows teach nothing}"
        ),
        measured="weights {seen}",
        shown_by="{how}",
        variants={
            "positives": {
                "summary": (
                    "pos_weight is 0 where {lost} targets are positive: they cost nothing, and the best answer is "
                    "always no"
                ),
                "measured": "pos_weight in {seen}; {count} of {all} targets positive",
                "shown_by": "the factor of the positive term in binary_cross_entropy_with_logits",
                "repair": "pos_weight=negatives / positives; // makes 0 of it where most labels are positive",
            }
        },
        repair=(
            "where the weights are made: if they are divided with //, divide as floats: total / (classes * counts)"
        ),
        explains=(*LEARNING, "every_row_teaches:class_costs_a_constant", "every_row_teaches:rows_left_out"),
        source="https://github.com/yu-changqian/pytorch-segmentation/issues/4",
    ),
    "blank_in_targets": _target(
        proof="the labels of a CTC loss contain the blank",
        summary="{count} of {all} targets of {call} contain {blank}, which is the blank",
        measured="target {seen} within its length",
        shown_by="the labels within target_lengths",
        repair="number the labels without the blank, or give another blank=",
        source=f"{_DOCS}CTCLoss.html",
    ),
    "lengths_refused": _learns(
        proof="torch raises for the lengths given to a CTC loss",
        summary="the lengths given to {call} do not fit its input and targets",
        shown_by="torch raised: {error}",
        repair="input_lengths count frames of the log-probabilities (after downsampling), target_lengths labels",
        source=f"{_DOCS}CTCLoss.html",
    ),
    "alignment_impossible": _seen(
        proof="a target of a CTC loss has more labels than its input has frames",
        summary=(
            "{count} of {all} targets of {call} are longer than their inputs: no alignment exists, and "
            "{dropped:?they are left out|the loss is infinite}"
        ),
        measured=(
            "log_probs has {given} frames, input_lengths says {frames}, and {labels} labels need {needed}"
            "{repeats:? (a blank is needed between equal labels)|}"
        ),
        shown_by="labels and repeats within target_lengths, against input_lengths",
        repair=(
            "give the lengths after the model as input_lengths, without padding as target_lengths; where the model "
            "itself leaves too few frames, use fewer downsampling steps"
        ),
        explains=(*LEARNING, "finite"),
        source=f"{_DOCS}CTCLoss.html",
    ),
    "frames_left_out": _seen(
        proof="a CTC loss reads at most half of the frames of the longest row",
        summary="{call} reads {most} of {given} frames of the longest row",
        measured="log_probs has {given} frames, and input_lengths of {rows:row} say {most} at most",
        shown_by="the longest row of a batch should have all frames, up to rounding",
        repair=(
            "count the frames after the model: each layer of kernel k and stride s makes (length - k) // s + 1 of "
            "length; do not divide lengths twice"
        ),
        settle="rows that are padded to a fixed length may all be shorter than half of it",
        source="https://github.com/openspeech-team/openspeech/issues/76",
    ),
    "frames_of_padding": _seen(
        proof="a CTC loss aligns labels with frames that are padding, as lengths or a mask of the batch say",
        summary="{call} takes frames of padding for speech: its input_lengths are {given} for every row",
        measured="of {rows:row} the shortest has {fewest} frames; with the true lengths this loss is {loss:.4g} in "
        "place of {was:.4g}",
        shown_by="of the padding, {by}; log_probs has {given} frames for {wide} positions of the input",
        repair="give the lengths after the model: input_lengths = model.output_lengths(lengths)",
        explains=(*LEARNING, "padding_invariance"),
        source="https://github.com/ShankHarinath/DeepSpeech2-Keras/issues/3",
    ),
    "padding_counted": _seen(
        proof=(
            "positions that are padding in the input get a gradient from the loss, all with one label where padding is "
            "not declared"
        ),
        summary="{part:share} of the positions that count in {call} are padding",
        measured="{count} of {all} positions{losses}",
        shown_by="all of them hold the padding in the model's input, and {labels}",
        variants={
            "mean": {
                "summary": "the losses of {count} real positions are divided by all {all} positions",
                "measured": "{part:share} of the mean's positions are padding, with loss 0",
                "shown_by": "the gradient of what is backpropagated at each of them is 1 over the number of all",
                "repair": "divide by the number of real positions: (loss * mask).sum() / mask.sum()",
            }
        },
        repair="label padded positions with ignore_index, or leave them out of the mean",
        explains=(*LEARNING, "padding_invariance"),
        source="https://github.com/lucidrains/DALLE-pytorch/issues/57",
    ),
    "divided_by_the_others": _seen(
        proof="the places that count weigh 1 over the number of those that do not, in rows with different numbers",
        summary="the losses of the places that count in {call} are divided by the number of those that do not",
        measured="row {row}: {kept} of {places} places count, each by 1 over the other {others} and a constant",
        shown_by="the gradient of what is backpropagated at each place, in {rows} rows",
        repair="one of the two masks is inverted: (each * mask).sum(-1) / mask.sum(-1). each.masked_fill(mask, 0) "
        "keeps what is not masked: each.masked_fill(~mask, 0)",
        source="https://github.com/lucidrains/voicebox-pytorch/issues/6",
    ),
    "labels_misplaced": _learns(
        change=("sorting", "data"),
        proof="some rows have labels at padded positions, and others none at their last real ones",
        summary=(
            "{wrong} of {all} rows have the labels of another row in {call}: they have more or fewer labels than tokens"
        ),
        measured=(
            "row {first}: {first_labels} labels, {first_tokens} positions that are not padding; row {second}: "
            "{second_labels} labels, {second_tokens} positions"
        ),
        shown_by=(
            "{permuted:?the same lengths occur among the rows of labels and of inputs, in another order|labels at "
            "padded positions of some rows, and real positions without labels at the end of others}"
        ),
        repair="sort, shuffle and pad whole rows, then split them into fields: rows = sorted(rows, key=...)",
        do_not="mask the labels at padded positions: real positions would keep the labels of other rows",
        explains=(*LEARNING, "padding_invariance"),
        source="https://github.com/asappresearch/slue-toolkit/issues/37",
    ),
    "ignore_index_mismatch": _seen(
        proof="padded positions of one label count, and another label is ignored",
        summary=(
            "{part:share} of the positions that count in {call} are padding: ignore_index is {ignored}, and padded "
            "positions are labelled {label}"
        ),
        measured="{count} of {all} positions{losses}",
        shown_by="all of them hold the padding in the model's input, and {labels}",
        variants={
            "shared": {"do_not": "set ignore_index={label}: {real} real positions have label {label} as well"},
        },
        repair="pass the label of padded positions as ignore_index",
        explains=(*LEARNING, "padding_invariance"),
        source="https://github.com/lukas-blecher/LaTeX-OCR/issues/305",
    ),
    "real_class_ignored": _seen(
        change=("criterion", "seen"),
        proof="a label of real positions is the ignored one",
        summary=(
            "{count} positions that are not padding have the label {ignored}, which {call} ignores"
            "{shared:?: padding and a real class share it|}"
        ),
        measured="{part:share} of the positions",
        shown_by="the padding of the input against the labels",
        variants={
            "between": {
                "summary": (
                    "{call} ignores {count} labels of {ignored} in the middle of rows, although the model reads "
                    "{ignored} as input: it never learns to output {ignored}"
                ),
                "measured": "{part:share} of the labels",
                "shown_by": "labels that count come before and after them in the same row, so they are not padding",
                "repair": "leave ignore_index out, or label padding -100, so that {ignored} is learned",
            },
            "binary": {
                "summary": "{call} over 2 classes ignores label {ignored}: only label {other} trains",
                "measured": "{count} of {all} labels are {ignored}",
                "shown_by": (
                    "the scores have two classes, and all labels are one of these{alone:?; no row with label {ignored} "
                    "gets a gradient, and all others raise the score of class {other}|}"
                ),
                "repair": "leave ignore_index out here, or use a criterion of its own for these labels",
            },
        },
        repair="label padding -100, the default of ignore_index, so that every class is learned",
        source="https://github.com/ibm-granite/granite-3.1-language-models/issues/2",
    ),
    "end_never_a_target": Cause(
        proof=(
            "the last real id of every padded row is the id of padding, and its label is ignored in all of them, while "
            "the label before it counts"
        ),
        summary=(
            "the end of every row, id {token}, is never a target of {call}: padding has this id too, and its labels "
            "are ignored by their value"
        ),
        measured="{rows:row} with different ids end with {token}; no label of the run is {token}",
        shown_by=(
            "the ids that the embedding looked up against the labels; padding is known ({known}); no gradient of this "
            "loss raises the score of {token}"
        ),
        variants={
            "by id": {
                "summary": (
                    "the end of every row, id {token}, is never a target of {call}: padding has this id too, and "
                    "ignore_index={token} leaves both out"
                ),
                "repair": (
                    "labels = labels.masked_fill(mask == 0, -100), and leave ignore_index={token} out; or pad with "
                    "another id"
                ),
            },
        },
        repair=(
            "ignore labels by the mask and not by their value: labels[attention_mask == 0] = -100; or pad with another "
            "id"
        ),
        settle="a model that is to be stopped by its length alone needs no end",
        change=("filled", "data"),
        explains=(*LEARNING, "loss_contract:real_class_ignored"),
        source="https://github.com/huggingface/trl/issues/976",
    ),
    "shifted_twice": _learns(
        proof="the labels of a causal model are the inputs two positions ahead",
        summary=(
            "{unsure:?it seems that |}labels are shifted {twice:?twice|by {ahead}}: the output of a causal model is "
            "compared with the token {ahead} positions ahead ({call})"
        ),
        measured=(
            "{count} labels are the id {far} and not the next one, and none is otherwise; the probability of that in "
            "ids of random order is {chance}"
        ),
        shown_by=(
            "the labels against the ids that the embedding looked up; "
            "{unsure:?{unsure}|no output depends on later inputs}"
        ),
        repair="compare the output at t with the token at t + 1, shifting once: in the data, or in the loss",
        source="https://github.com/huggingface/transformers/issues/47394",
    ),
    "not_shifted": _learns(
        proof="the labels of a causal model are the inputs of the same position, or of the previous one",
        summary=(
            "{unsure:?it seems that |}labels are {back:?shifted the wrong way|not shifted}: a causal model is asked to "
            "predict the {back:?previous token|token that it already gets as input} ({call})"
        ),
        measured=(
            "{count} labels are the id {far} and not the next one, and none is otherwise; the probability of that in "
            "ids of random order is {chance}"
        ),
        shown_by=(
            "the labels against the ids that the embedding looked up; "
            "{unsure:?{unsure}|no output depends on later inputs}"
        ),
        repair="compare the output at t with the token at t + 1, shifting once: in the data, or in the loss",
        source="https://github.com/huggingface/transformers/issues/27517",
        change=("data", "seen"),
    ),
    "start_token_twice": _learns(
        proof="every row of ids begins with one token twice, and no other position has it",
        summary="every sequence begins with token {token} twice",
        measured="all {rows} different rows begin with it twice, and it is at no other position",
        shown_by=(
            "the ids that the embedding looked up{trained:?; the label at the first position is token {token} too, so "
            "the model learns to repeat it|}"
        ),
        repair=(
            "tokenize text from a chat template with add_special_tokens=False; strip the decoder's start token from "
            "labels that the model shifts right itself"
        ),
        settle="a model of n-grams may begin with several start tokens",
        source="https://github.com/OpenRLHF/OpenRLHF/issues/393",
        change=("data", "seen"),
    ),
    "ids_out_of_range": Cause(
        proof="ids beyond the rows of an embedding",
        summary="the embedding{module:? {module}|} has rows 0 to {last} and is given ids {low} to {high}",
        shown_by="torch raised: {error}",
        repair="resize the embedding to the tokenizer (resize_token_embeddings), or map the ids",
        explains=LEARNING,
        change=("module", "seen"),
        source="https://github.com/mickeysjm/R-BERT/issues/5",
    ),
    "sides_turned": _learns(
        proof="in every row the score of what the batch names negative is raised, and that of the positive lowered",
        summary="training raises the scores of {bad} and lowers those of {good}: the names say the opposite",
        measured="in all rows that compare the two, in {calls:call}",
        shown_by=(
            "the gradients of what is backpropagated with respect to the two scores, which are products or "
            "log-probabilities: no distances"
        ),
        repair="minimise softplus(negative - positive), or -logsigmoid(positive - negative)",
        source="https://github.com/SmartDataAnalytics/Knowledge-Graph-Analysis-Programming-Exercises/issues/1",
    ),
    "no_pairs": _seen(
        proof="the labels of every call are all different, or all the same, and the loss is exactly 0",
        summary=(
            "{call} has no {positive:?positive pair: no two rows have one label|negative pair: all rows have one "
            "label}, and the loss is 0"
        ),
        measured="{different} different labels in {all} rows; loss 0",
        shown_by="the labels, the loss and its gradient in every call",
        repair="sample several rows of each class, or give both views of a row one label",
        explains=(*LEARNING, *NO_SLOPE),
        source="https://kevinmusgrave.github.io/pytorch-metric-learning/samplers/",
    ),
    "head_too_wide": Cause(
        proof="the labels of the run are few of the head's classes: its lower eighth at most, or one class",
        summary="the head is {times} times wider than the labels: {count} classes, and no label above {high}",
        measured="{count} classes for labels up to {high}: {times} times as many",
        shown_by="all targets of the recorded steps",
        repair=(
            "build the head with as many outputs as there are labels, model.head = nn.Linear(width, classes): setting "
            "out_features of an existing layer changes nothing; or check the mapping from names to labels"
        ),
        change=("module", "seen"),
        judged="batches= with the project's own labels show whether the others occur",
        variants={
            "one class": {
                "summary": "all labels are class {high}: of {count} classes no other occurs",
                "measured": "{labels:label} of class {high}, for a head of {count} classes",
                "repair": "look at the labels of a batch: those that were divided by 255, or cast from shares by "
                ".long(), are 0 everywhere",
            }
        },
        source="https://github.com/facebookresearch/ConvNeXt/issues/110",
    ),
    "classes_imbalanced": _seen(
        proof="fewer than 5 % of the labels are positive, without a weight",
        summary="{part:share} of the labels given to {call} are positive, and no pos_weight is given",
        measured="{count} of {all} labels of a call",
        shown_by="the targets of every recorded call",
        repair="give pos_weight=negatives / positives",
        source=f"{_DOCS}BCEWithLogitsLoss.html",
    ),
}
