"""The causes of ``accumulation_equivalence``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.core.registry import Cause, finding_maker

OF_EVERY_CALL = ("k", "ratio", "direction", "parameters", "precision", "updates", "got", "full")
"""Facts of every comparison (``windows.Split.facts``)."""

WEIGHTS = "as weighted sums of the micro-batches' own gradients: {got} accumulated, {full} in one batch"

_MEASURED = "|g_{k}| / |g_1| = {ratio:.3f}, {direction}, all {parameters} parameters, {precision}"
_MOVED = "after the last step weights differ by {updates:share} of how far they moved, {precision}"
_AGREE = "windows and one batch give the same gradients and the same weights"
_TIMES = "{k} micro-batches give {factor:.2f} times the gradient of the same rows in one batch"
_UNEQUAL = "{k} micro-batches weigh {factor:.2f} times what they should on average, and short ones as much as long ones"
_DONE = "the step comes after {done} of {k} micro-batches"
_ABSENT = "{absent} of {k} micro-batches {several:?do|does} not count: "
_HELD = "with the optimizer's options held as they were at the start, " + _AGREE


def _shown(text: str) -> str:
    return text + "{got:?; " + WEIGHTS + "|}"


_FACTOR = _shown("the factor is {exact:?exactly {exact}|{factor:.3g}}{sizes:? for splits into {sizes}|}")

_cause = partial(Cause, measured=_MEASURED, change=("seen",))
_learns = partial(_cause, explains=LEARNING)
_inside = partial(
    Cause,
    measured="|g_{k}| / |g_1| = {ratio:.4g} in a window of {k} micro-batches, " + _MOVED,
    change=("seen",),
    explains=LEARNING,
)

CAUSES = {
    "loss_not_divided": _learns(
        proof="every micro-batch, or one term of its loss, weighs k times what it does in one batch",
        summary=_TIMES,
        shown_by=_FACTOR,
        repair="divide the loss by the number of micro-batches of its window, before backward(); with unequal token "
        "counts divide the summed loss by the number of all tokens",
        variants={
            "unequal": {"summary": _UNEQUAL},
            "one term": {
                "summary": "a term of the loss is not divided: what it adds to the gradient grows with the number of "
                "micro-batches",
                "shown_by": _shown("the excess over 4 micro-batches is exactly three times the excess over 2"),
            },
            "by place": {
                "summary": "each micro-batch is divided by its place in the window, not by the number of micro-batches",
                "shown_by": _shown("the first weighs exactly 2, 3, ... times what the second, third, ... weighs"),
            },
        },
        source="https://github.com/ApolloResearch/e2e_sae/pull/70",
    ),
    "divided_twice": _learns(
        proof="micro-batches weigh 1/k of what they do in one batch, or less with every later one",
        summary=_TIMES,
        shown_by=_FACTOR,
        repair="divide once only: either the loss, or the gradients after the last micro-batch",
        variants={
            "unequal": {"summary": _UNEQUAL},
            "again": {
                "summary": "the accumulated .grad is {divided} again with every further micro-batch of the window",
                "shown_by": _shown(
                    "{by_k:?each micro-batch weighs exactly 1/{k} of what the next one weighs|the last micro-batch "
                    "weighs what it does in one batch, each one before it {factor:.4g} times the next}"
                ),
            },
        },
        source="https://github.com/unslothai/unsloth-zoo/pull/1023",
    ),
    "count_rounded_down": _cause(
        proof="the gradient is (rows // k) * k / rows of what it is in one batch, and right where k divides the rows",
        summary="{k} micro-batches give {factor:.4g} times the gradient of one batch: {rows} does not divide by {k}",
        shown_by=_shown("the factor is exactly ({rows} // k) * k / {rows} for splits into {sizes}"),
        repair="weigh a micro-batch by the rows that it has, len(x) / rows, not by rows // accumulate",
        settle="or choose a number of micro-batches that divides the rows of a batch",
    ),
    "only_last_counts": _learns(
        proof="the first micro-batches of a window weigh nothing",
        summary=_ABSENT + "{several:?their gradients are|its gradient is} cleared before the step",
        shown_by="{got:?" + WEIGHTS + "|}",
        repair="call zero_grad() once for each step, right after it, not once for each micro-batch",
        variants={
            "no backward": {
                "summary": _ABSENT + "backward() is not called for their loss",
                "repair": "call backward() for every micro-batch: only the step waits for the window's end",
            },
        },
        source="https://github.com/tientrandinh/Revisiting-Reverse-Distillation/issues/12",
    ),
    "mean_of_means": _learns(
        proof="all micro-batches weigh the same, where in one batch each weighs by its valid targets",
        summary="micro-batches with unequal numbers of valid targets weigh {got} when accumulated, and {full} in one "
        "batch",
        shown_by="in one batch each weighs in proportion to its number of valid targets; " + WEIGHTS,
        repair="sum the loss over tokens (reduction='sum') and divide by the number of valid targets in the whole "
        "window",
        variants={
            "own weights": {
                "summary": "micro-batches whose rows have unequal weights weigh {got} when accumulated, and {full} in "
                "one batch",
                "shown_by": WEIGHTS,
            },
            "declared loss": {
                "summary": "accumulated as a mean of micro-batch means, this loss would weigh {k} parts wrongly",
                "measured": "in one batch they weigh {full}, divided by {k} they would weigh the same",
                "shown_by": "the whole batch's gradient written as a weighted sum of its parts' gradients, float64",
            },
        },
        source="https://github.com/meta-pytorch/torchtune/pull/1875",
    ),
    "carried_over": _learns(
        proof="the second window holds gradients of the first one's micro-batches",
        summary="the second window of {k} micro-batches still contains gradients of the first window",
        shown_by="the excess is the sum of the first window's micro-batches, with weights {excess}",
        repair="call zero_grad() right after every step, before the next micro-batch's backward()",
        source="https://github.com/meta-pytorch/torchforge/pull/71",
    ),
    "stepped_inside_window": _learns(
        proof="a step comes before all micro-batches of the window have had their backward pass",
        summary="{steps:?{steps} steps over {due} windows of {k} micro-batches: |}" + _DONE,
        shown_by="counted from the backward passes before it",
        repair="step after the last micro-batch of a window only: if (i + 1) % accumulate == 0; pass the knob on to "
        "the loop",
        variants={
            "weighed": {"summary": _DONE, "shown_by": WEIGHTS},
            "knob unused": {
                "summary": "the loop did the same with {knob}=1 and {knob}={k}: the knob does not reach it",
                "shown_by": "over the same {k} micro-batches losses and steps are the same with both, bit for bit",
                "repair": "give {knob} to the loop, or take the parameter out of the test function",
            },
            "not prepared": {
                "summary": "{steps:?{steps} steps over {due} windows of {k} micro-batches: |}" + _DONE + ", since the "
                "optimizer was not given to accelerator.prepare()",
                "shown_by": "counted from the backward passes before it; accelerate makes the backward passes, and not "
                "these steps",
                "repair": "model, optimizer = accelerator.prepare(model, optimizer)\n"
                "a prepared optimizer steps once a window inside accelerator.accumulate(model)",
                "do_not": "count micro-batches by hand: accumulate() does",
            },
        },
        source="https://github.com/thunlp/OpenPrompt/issues/106",
        change=("condition", "seen"),
    ),
    "clipped_inside_window": _inside(
        proof="windows and one batch agree once gradients are clipped after the last micro-batch of a window only",
        summary="gradients are clipped after every micro-batch, not once per step",
        shown_by="with gradients clipped after the last micro-batch of a window only, " + _AGREE,
        repair="clip once, after the last micro-batch of a window and before the step",
        source="https://github.com/facebookresearch/lingua/pull/59",
    ),
    "scheduled_inside_window": _inside(
        proof="the schedule moves on between the micro-batches of a window; with the optimizer's options held, windows "
        "and one batch agree",
        summary="the schedule moves on with every micro-batch, {k} times for each step",
        shown_by=_HELD,
        repair="step the scheduler once for each optimizer step, right after it",
        explains=(*LEARNING, "schedule:per_micro_batch"),
        variants={
            "by hand": {
                "summary": "the loop writes the optimizer's learning rate or momentum with every micro-batch, {k} "
                "times for each step",
                "measured": _MOVED,
                "repair": "run this line once per window, where optimizer.step() is called; keep the line here only if "
                "it should count batches",
            },
        },
        source="https://github.com/starVLA/starVLA/pull/210",
    ),
    "averaged_inside_window": _inside(
        proof="windows and one batch agree once the average or target network moves once for each step",
        summary="an average or target network follows the weights with every micro-batch, {k} times for each step",
        shown_by="with it moved once for each step only, " + _AGREE,
        repair="update the average right after optimizer.step(), not with every micro-batch",
        source="https://github.com/SWivid/F5-TTS/issues/631",
        change=("call of helper", "seen"),
    ),
    "statistic_inside_window": _inside(
        proof="windows and one batch agree once the statistic is updated once for each step",
        summary="a running statistic is updated with every micro-batch, {k} times for each step",
        shown_by="with it updated once for each step only, " + _AGREE,
        repair="update it once for each optimizer step, from the whole window",
        source="https://github.com/lucidrains/vector-quantize-pytorch/issues/221",
    ),
    "changed_inside_window": _inside(
        proof="windows and one batch agree once the loop writes nothing to gradients or weights between micro-batches",
        summary="gradients are changed with every micro-batch ({names}), and not once for each step",
        shown_by="with gradients changed after the last micro-batch of a window only, " + _AGREE,
        repair="do it once, after the last micro-batch of a window and before the step",
        variants={
            "weights": {
                "summary": "weights are changed between the micro-batches of a window, outside of the optimizer",
                "shown_by": "with these changes made once for each step only, " + _AGREE,
            },
            "hooks": {
                "summary": "a hook on the parameters changes the gradient of every micro-batch, not of their sum",
                "shown_by": "with these hooks left out, " + _AGREE,
            },
        },
        source="https://github.com/keras-team/keras/issues/19990",
    ),
    "term_grows_with_rows": Cause(
        proof="when every row occurs twice, one part of the gradient doubles and the other stays; of two rows one part "
        "is the sum of theirs and the other the mean",
        summary="one term of the loss is a sum over the rows, another a mean: their ratio changes with the number of "
        "rows{accumulates:?, and so with the number of micro-batches|}",
        measured="for {once} alone and for {twice} {values:?{values}; |}the gradients differ by {difference:share}, "
        "float64",
        shown_by="checked exactly on the gradients of two rows: each alone, both together, both twice",
        repair="average both over the rows (kl.sum(1).mean() in place of kl.sum()), or sum both",
        change=("seen",),
        judged="with an argument accumulate= it is a fault: micro-batches weigh the terms differently than one batch",
        source="https://github.com/GlassyWing/nvae/issues/3",
    ),
    "divided_by_rows_again": Cause(
        proof="when every row occurs twice, the whole gradient is half as large, where that of a mean stays: of two "
        "rows, and of each of them",
        summary="the loss is a mean over the rows, divided by their number once more",
        measured="for {twice} the gradient is half of that for {once}, float64",
        shown_by="checked exactly on the gradients of two rows: each alone, both together, all of them twice",
        repair="leave out the division, or divide the penalty on weights alone",
        change=("seen",),
        source="https://github.com/pyg-team/pytorch_geometric/pull/7384",
    ),
    "last_window_lost": Cause(
        proof="the micro-batches after the last full window are never stepped",
        summary="no step uses the last {left:micro-batch} of the data: the last window is incomplete",
        measured="the check gave {items} micro-batches in windows of {window}: {left:backward pass} after the last "
        "step",
        shown_by="their gradients are still in .grad when fit returns",
        repair="call step() once more after the loop, and divide the losses of the short window by its own number of "
        "micro-batches; or drop the remainder on purpose",
        change=("seen",),
        source="https://github.com/tomhosking/torchseq/issues/8",
    ),
    "update_differs": Cause(
        proof="windows and one batch give another gradient or update, and none of the other causes explains it",
        summary="{k} micro-batches give another gradient than the same rows in one batch, {within:?in weights of no "
        "known pattern|and no weights of the micro-batches explain it}",
        measured="|g_{k}| / |g_1| = {ratio:.3f}, {direction}; {within:?"
        + WEIGHTS
        + "|{outside:.1e} of it lies outside the span of their gradients}",
        shown_by="not determined; ruled out: a wrong factor, cleared micro-batches, a mean of means, random numbers, a "
        "clip, a schedule of the rates, an average or target network, a statistic, hooks",
        repair="look for what weighs or scales each micro-batch alone: a clip inside the window, a weight, a schedule",
        variants={
            "unknown": {
                "repair": "look for a value that the loop itself updates at every micro-batch: the weight of a term, a "
                "temperature, a running value",
            },
            "constant": {
                "summary": "{k} micro-batches give {factor:.4g} times the gradient of the same rows in one batch",
                "measured": _MEASURED,
                "shown_by": _shown(
                    "splits into {sizes} give the gradient of one batch: a count was rounded, or a constant is right "
                    "for one number of micro-batches only"
                ),
            },
            "learning rates": {
                "summary": "accumulating over {k} micro-batches gives the same gradient and another update",
                "measured": _MOVED,
                "shown_by": "the learning rates at the same optimizer steps differ",
                "repair": "step the scheduler once for each optimizer step, or skip the check where learning rates are "
                "to scale",
            },
        },
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

found = finding_maker(CAUSES)
