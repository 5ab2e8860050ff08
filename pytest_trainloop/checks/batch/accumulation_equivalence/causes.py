"""The causes of ``accumulation_equivalence``, and their repairs under other frameworks. No torch."""

from __future__ import annotations

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.registry import Cause

CAUSES = {
    "loss_not_divided": Cause(
        proof="every micro-batch, or one term of its loss, weighs k times what it does in one batch",
        repair="loss = loss / accumulate before backward(); with unequal token counts divide the summed loss by the "
        "number of all tokens",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/ApolloResearch/e2e_sae/pull/70",
    ),
    "divided_twice": Cause(
        proof="micro-batches weigh 1/k of what they do in one batch, or less with every later one",
        repair="divide once only: either the loss, or the gradients after the last micro-batch",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/unslothai/unsloth-zoo/pull/1023",
    ),
    "count_rounded_down": Cause(
        proof="the gradient is (rows // k) * k / rows of what it is in one batch, and right where k divides the rows",
        repair="weigh a micro-batch by the rows that it has, len(x) / rows, not by rows // accumulate",
        change=("seen",),
        settle="or choose a number of micro-batches that divides the rows of a batch",
    ),
    "only_last_counts": Cause(
        proof="the first micro-batches of a window weigh nothing",
        repair="call zero_grad() once for each step, right after it, not once for each micro-batch",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/tientrandinh/Revisiting-Reverse-Distillation/issues/12",
    ),
    "mean_of_means": Cause(
        proof="all micro-batches weigh the same, where in one batch each weighs by its valid targets",
        repair="sum the loss over tokens (reduction='sum') and divide by the number of valid targets in the whole "
        "window",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/meta-pytorch/torchtune/pull/1875",
    ),
    "carried_over": Cause(
        proof="the second window holds gradients of the first one's micro-batches",
        repair="call zero_grad() right after every step, before the next micro-batch's backward()",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/meta-pytorch/torchforge/pull/71",
    ),
    "stepped_inside_window": Cause(
        proof="a step comes before all micro-batches of the window have had their backward pass",
        repair="step after the last micro-batch of a window only: if (i + 1) % accumulate == 0; pass the knob on to "
        "the loop",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/thunlp/OpenPrompt/issues/106",
    ),
    "clipped_inside_window": Cause(
        proof="with gradients clipped after the last micro-batch of a window only, windows and one batch agree",
        repair="clip once, after the last micro-batch of a window and before the step",
        change=("seen",),
        explains=LEARNING,
        source="https://github.com/facebookresearch/lingua/pull/59",
    ),
    "scheduled_inside_window": Cause(
        proof="the schedule moves on between the micro-batches of a window; with the optimizer's options held, windows "
        "and one batch agree",
        repair="step the scheduler once for each optimizer step, right after it",
        change=("seen",),
        explains=LEARNING,
        source="https://github.com/starVLA/starVLA/pull/210",
    ),
    "averaged_inside_window": Cause(
        proof="with the average or target network moved once for each step, windows and one batch agree",
        repair="update the average right after optimizer.step(), not with every micro-batch",
        change=("seen",),
        explains=LEARNING,
        source="https://github.com/SWivid/F5-TTS/issues/631",
    ),
    "statistic_inside_window": Cause(
        proof="with the statistic updated once for each step, windows and one batch agree",
        repair="update it once for each optimizer step, from the whole window",
        change=("seen",),
        explains=LEARNING,
        source="https://github.com/lucidrains/vector-quantize-pytorch/issues/221",
    ),
    "changed_inside_window": Cause(
        proof="with what the loop writes to gradients or weights between micro-batches left out, windows and one batch "
        "agree",
        repair="do it once, after the last micro-batch of a window and before the step",
        change=("seen",),
        explains=LEARNING,
        source="https://github.com/keras-team/keras/issues/19990",
    ),
    "term_grows_with_rows": Cause(
        proof="with every row twice one part of the gradient doubles and the other stays; of two rows one part is the "
        "sum of theirs and the other the mean",
        repair="average both over the rows (kl.sum(1).mean() in place of kl.sum()), or sum both",
        change=("seen",),
        settle="with a knob accumulate it is a fault: micro-batches weigh the terms otherwise than one batch",
        source="https://github.com/GlassyWing/nvae/issues/3",
    ),
    "last_window_lost": Cause(
        proof="the micro-batches after the last full window are never stepped",
        repair="step once more after the loop when a window is open, and divide its losses by the micro-batches "
        "that it has, not by accumulation_steps; or drop the remainder on purpose",
        change=("seen",),
        source="https://github.com/tomhosking/torchseq/issues/8",
    ),
    "update_differs": Cause(
        proof="windows and one batch give another gradient or update, and none of the other causes explains it",
        repair="look for what weighs or scales each micro-batch alone: a clip inside the window, a weight, a schedule",
    ),
}

REPAIRS_IN = {
    ("transformers", "loss_not_divided"): (
        "the Trainer leaves the division to a model that takes num_items_in_batch, and this one does not divide: sum "
        "the loss and divide by num_items_in_batch, or set loss_is_scaled_for_ga = False on the Trainer's class"
    ),
    ("transformers", "divided_twice"): "do not divide in compute_loss: the Trainer divides already",
    ("lightning", "divided_twice"): (
        "do not divide in training_step: a Trainer with accumulate_grad_batches divides what it returns"
    ),
    ("accelerate", "divided_twice"): "do not divide before accelerator.backward(loss), which divides",
    ("accelerate", "stepped_inside_window"): (
        "with accelerator.accumulate(model): around each micro-batch; outside of it a prepared optimizer always steps"
    ),
}
"""What to change where a framework's code calls backward."""
