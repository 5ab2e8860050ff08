"""The causes of ``step_order``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.wiring.consequences import LEARNING, TRAINING
from pytest_trainloop.core.registry import Cause, finding_maker

_seen = partial(Cause, change=("seen",))
_trains = partial(_seen, explains=TRAINING)
_kept = partial(_seen, explains=(*TRAINING, "resume_equivalence:state_lost"))  # gradients that no checkpoint holds
_clip = partial(_seen, explains=("finite", "update_ratio"))

CAUSES = {
    "not_zeroed": _kept(
        proof=(
            "a step uses, bit for bit, gradients that an earlier step has used; or a gradient that is not finite stays "
            "in .grad, and all later ones are added to it"
        ),
        summary="gradients are never zeroed: {names} {names:are} stepped with their sum over all batches so far",
        measured="{again} of {steps} steps used gradients that the step before had used already",
        repair="optimizer.zero_grad() before this line, or right after optimizer.step()",
        change=("backward", "seen"),
        variants={
            "not finite": {
                "summary": (
                    "a gradient that is not finite is never zeroed: later gradients are added to it, and no step is "
                    "made"
                ),
                "measured": (
                    "{onto} of {passes} backward passes add finite gradients to one that is not finite; 0 steps"
                ),
                "repair": (
                    "call zero_grad() before backward(), not after step(): gradients of a skipped batch must be zeroed "
                    "too"
                ),
            }
        },
        source="https://github.com/IDEA-Research/DN-DETR/issues/19",
    ),
    "wrong_object_zeroed": _kept(
        proof="zero_grad() runs, but not for the parameters whose used gradients are still in .grad",
        summary=(
            "zero_grad() zeroes other parameters: {names} {names:are} stepped with the sum of the gradients of all "
            "batches so far"
        ),
        measured="{again} of {steps} steps used gradients that the step before had used already",
        repair="replace this line by zero_grad() of the optimizer that holds these parameters",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/591",
    ),
    "zeroed_before_step": _trains(
        proof="gradients are zeroed between backward and step, so steps find nothing",
        summary="gradients are zeroed between backward() and step(): {empty} of {steps} steps found no gradient",
        measured="{empty} of {steps} steps found no gradient: those of {lost:backward pass} were zeroed before",
        shown_by="order seen: backward, {by}, step",
        repair="move this line before backward() or after step(): never between the two",
        variants={
            "zeros": {
                "summary": (
                    "{by} leaves gradients of exactly 0 between backward() and step(): there is nothing left to use"
                ),
                "shown_by": "order seen: backward with gradients that are not zero, {by}, step with zeros",
                "repair": (
                    "look at what the gradients are multiplied by, and in which dtype: a norm that overflows gives a "
                    "factor of 0, and float16 holds nothing below 6e-8"
                ),
            }
        },
        source="https://github.com/lucidrains/byol-pytorch/issues/93",
    ),
    "zeroed_inside_window": _trains(
        proof="in every window the gradients of all micro-batches but the last are zeroed before the step",
        summary="gradients are zeroed inside the accumulation window: {lost} of {size} micro-batches are lost",
        measured="the gradients of {all_lost} of {passes} backward passes were zeroed before a step",
        repair="move this line after optimizer.step(): zero once per step, not once per micro-batch",
        explains=("accumulation_equivalence", *TRAINING),
        source="https://github.com/gaozhihan/PreDiff/issues/32",
    ),
    "step_missing": _trains(
        proof="backward passes compute gradients, and no step of the optimizer that holds the parameters follows",
        summary="{passes} backward passes computed gradients, but the {kind} that holds the parameters made no step",
        measured="{passes} backward passes, 0 steps, no parameter changed",
        repair="call optimizer.step() after backward()",
        variants={
            "no optimizer": {
                "summary": "{passes} backward passes computed gradients, but no optimizer was given or seen",
            },
            "stops": {
                "summary": "the {kind} stops after {steps:step}: no step uses the {passes} backward passes that follow",
                "measured": "{steps:step}, then {passes} backward passes without one",
                "shown_by": "the last step is followed by {passes} backward passes that bring gradients",
                "repair": "find out why the condition of optimizer.step() is never true again",
            },
            "by the knob": {
                "summary": (
                    "with accumulate={size} fit makes {passes} backward passes and no step; by default it makes "
                    "{steps:step}"
                ),
                "measured": "accumulate={size}: {passes} backward passes, 0 steps",
                "shown_by": "the loop was run with its own value of accumulate, and with accumulate={size}",
                "repair": "step once every `accumulate` micro-batches: `if (i + 1) % accumulate == 0:`",
            },
            "scaled": {"repair": "call scaler.step(optimizer) and scaler.update() after backward()"},
            "refused": {
                "summary": (
                    "the loss is scaled and the scaler updated, and scaler.step(optimizer) is never called: nothing "
                    "trains"
                ),
                "measured": "{scaled:loss} scaled, 0 steps",
                "shown_by": "torch raised: {raised}",
                "repair": "scaler.step(optimizer) before this line",
            },
        },
        source="https://github.com/zhaoyuzhi/deepfillv2/issues/6",
    ),
    "backward_missing": _trains(
        proof="the optimizer steps again and again, and no backward pass brings a gradient",
        summary="{steps} optimizer steps found no gradient: no backward pass ever ran",
        measured="0 backward passes, {steps} steps, no parameter changed",
        repair="loss.backward() before this line, with the parentheses",
        source="https://github.com/Goingqs/PyramidBox/issues/7",
    ),
    "nothing_trains": Cause(
        proof=(
            "in 400 batches there is no backward pass and no optimizer step, and no weight or buffer of the model "
            "changes in any other way"
        ),
        summary="fit trains nothing: no backward pass and no optimizer step in {batches:batch}",
        measured="0 backward passes, 0 steps, {batches:batch}; no weight and no buffer of the model changed",
        repair="call loss.backward() and optimizer.step() for each batch that fit is given",
        explains=TRAINING,
        variants={
            "swallowed": {
                "summary": (
                    "fit trains nothing: no backward pass and no optimizer step in {batches:batch}; it swallows {error}"
                ),
                "shown_by": "fit raised the exception {times} times inside, and caught it each time",
                "repair": "do not catch this exception, and fix the line that raises it",
            },
            "not reached": {
                "shown_by": "this call of backward() is in the code that ran, and was never reached",
            },
        },
        source="https://github.com/automl/Auto-PyTorch/issues/281",
    ),
    "step_before_backward": _trains(
        proof="the step runs between the forward pass and its backward",
        summary=(
            "step() runs between the forward pass and its backward(): each step uses the gradient of an earlier "
            "batch, computed at older weights"
        ),
        measured="{late} of {passes} backward passes belong to a forward pass before the last step",
        repair="order: zero_grad(), forward, backward(), step()",
        variants={
            "empty": {
                "summary": "step() runs before backward(): {empty} of {steps} steps found no gradient",
                "measured": "{empty} of {steps} steps found none; those of {lost:backward pass} were zeroed unused",
            },
            "refused": {
                "summary": (
                    "step() runs between the forward pass and its backward(): it changes the weights that backward "
                    "needs, and torch refuses"
                ),
                "measured": "{steps:optimizer step} between the forward pass and its backward; torch raised: {raised}",
            },
            "scaler": {
                "summary": "scaler.step() runs before anything was scaled and backpropagated",
                "measured": "1 scaler step before the first backward pass",
                "shown_by": "torch raised: {raised}",
                "repair": (
                    "order: zero_grad(), forward, scaler.scale(loss).backward(), scaler.step(optimizer), "
                    "scaler.update()"
                ),
            },
        },
        source="https://github.com/pytorch/pytorch/issues/39141",
    ),
    "stepped_twice": _trains(
        proof="the same optimizer uses the same gradient more than once, with no backward between",
        summary="{names} {names:are} stepped twice on the same gradient",
        measured="{steps:step} used, bit for bit, the gradient that the step before had used",
        repair="remove this step(): the optimizer has already stepped for this backward pass (or window)",
        source="https://github.com/mzolfaghari/ECO-pytorch/pull/1",
    ),
    "gradient_kept": _trains(
        proof="steps use one gradient that user code assigned, while backward passes bring others",
        summary="{names} {names:are} stepped with the gradient of an earlier batch over and over",
        measured="{steps:step} used, bit for bit, what the step before had used, and nothing wrote it between",
        repair="run this line before every step: master.grad = p.grad.float()",
        source="https://github.com/NVIDIA/Megatron-LM/pull/6871",
    ),
    "another_loss_kept": _seen(
        proof="a step uses the gradients of its own backward passes and of one that another optimizer has already used",
        summary=(
            "{names} {names:are} stepped with the gradients of another loss too: another optimizer ({other}) has "
            "already stepped for that loss, and its gradients here were not zeroed"
        ),
        measured="{kept} of {steps} steps of {kind} used what the backward pass at {line} had left",
        repair="call zero_grad() of this optimizer before this line: .grad still holds the gradients of another loss",
        explains=("adversaries_oppose:gradients_mixed",),
        source="https://github.com/GaParmar/img2img-turbo/issues/56",
    ),
    "two_optimizers": _trains(
        proof="two optimizers use the same gradient of the same parameter",
        summary="{names} {names:are} stepped twice on the same gradient, by {by}",
        measured="{steps:step} used, bit for bit, the gradient that the step before had used",
        repair="leave these parameters out of one of the two optimizers",
        change=("group", "seen"),
        variants={
            "added": {
                "summary": (
                    "{names} {names:are} in two optimizers, {by}: the second one steps with the gradients that the "
                    "first one has used already"
                ),
                "measured": "{steps:step} of the second one used gradients that the first one had used already",
                "repair": (
                    "give this optimizer the parameters that it is to train\n"
                    "if both are to train these: zero_grad() after the step of the first one"
                ),
            }
        },
        source="https://github.com/MishaLaskin/curl/issues/28",
    ),
    "clip_after_step": _seen(
        proof="gradients are clipped after the step has used them and before they are zeroed",
        summary=(
            "gradients are clipped after step() has used them: {late} of {clips} clips change nothing that trains"
        ),
        measured="{late:clip} after the step, the first with limit {limit}",
        repair="clip between backward() and step()",
        explains=("finite", *LEARNING),
        source="https://github.com/jongwook/onsets-and-frames/issues/24",
    ),
    "scheduler_before_optimizer": _seen(
        proof="in the first iteration the scheduler steps before any optimizer, and its later calls are on the same "
        "line",
        summary=(
            "scheduler.step() runs before optimizer.step(): the first learning rate of the schedule is never used and "
            "every other comes one step early"
        ),
        measured="{steps:scheduler step}, the first before any optimizer step{lr:?, which then ran at learning rate "
        "{lr}|}",
        repair="move this line after optimizer.step()",
        source="https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate",
    ),
    "window_left_over": _seen(
        proof="the loop has no argument accumulate=, and its run ends with gradients that no step used",
        summary="the last accumulation window is incomplete: no step uses the last {left:backward pass}",
        measured="the last {left} of {passes:backward pass}; {items:batch}",
        repair=(
            "call step() once more after the loop, and divide the losses of the short window by its number of "
            "micro-batches; or drop the remainder on purpose (drop_last=True)"
        ),
        source="https://github.com/timoschick/pet/issues/36",
    ),
    "leaks_into_next": _trains(
        proof=(
            "a second epoch, or call of fit, starts with gradients in .grad, and its first step uses more backward "
            "passes than any other"
        ),
        summary=(
            "{left:micro-batch} left over at the end of one {next_one} are added to the first step of the next: it "
            "uses {used} backward passes, all others {size}"
        ),
        measured=(
            "{loader:?the loader's {loader} batches leave {rest} in windows of {own}; |}tried with {items:batch} in "
            "windows of {size}, which leave {left}"
        ),
        repair=(
            "step at the last batch too, and divide the losses of a short window by the number of micro-batches that "
            "it has"
        ),
        judged="give batches= as in the real run: where their number divides, nothing is left",
        source="https://github.com/meta-pytorch/torchtune/pull/2745",
    ),
    "clips_nothing": _clip(
        proof="no call of the clip finds a gradient that a step uses, and what is stepped is covered by no other clip",
        summary="{by} clips nothing: no gradient is there yet",
        measured=(
            "{calls} calls with limit {limit} clipped no gradient that a step uses; {steps:step} used gradients of "
            "{tensors:tensor} unclipped"
        ),
        shown_by="order seen: {by}, backward, step",
        repair="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) between backward() and step()",
        variants={
            "after zeroing": {
                "summary": "{by} clips nothing: after zero_grad() there is no gradient left",
                "shown_by": "order seen: backward, step, zeroing, {by}",
            },
            "wiped": {
                "summary": (
                    "{by} clips nothing: what it clips is zeroed before the step, which uses the gradient of another "
                    "backward pass"
                ),
                "shown_by": "order seen: backward, {by}, zeroing, backward, step",
                "repair": "clip after the last backward pass before step()",
            },
            "stand-ins": {
                "summary": (
                    "{by} clips nothing: it gets gradients or views of weights, not parameters, and these have no .grad"
                ),
                "shown_by": (
                    "each tensor of the call is the .grad of a parameter or shares its memory, and has no .grad itself"
                ),
                "repair": "give it the parameters themselves: {by}(model.parameters(), {limit})",
            },
            "used up": {
                "summary": "{by} clips nothing: the iterator that it gets is exhausted",
                "shown_by": "every call gets the same iterator, and it yields no tensor any more",
                "repair": "make it a list, list(...), where it is created; or give model.parameters() to each clip",
            },
        },
        source="https://github.com/yandex-research/tabm/issues/20",
    ),
    "clips_another": _clip(
        proof=(
            "no step uses the gradients that the clip gets, and the step after each call uses gradients that no clip "
            "covers"
        ),
        summary="{by} clips {clipped}, but the next step is that of {whose}: {unclipped} {unclipped:are} stepped "
        "unclipped",
        measured="{calls} calls with limit {limit}; no clip of the run covers what {whose} uses in {steps:step}",
        repair="give the clip the parameters of the optimizer that steps next",
        settle="clip each network on a line of its own, before its own step",
        source="https://github.com/lucidrains/magvit2-pytorch/pull/10",
    ),
    "clips_one_group": _clip(
        proof=(
            "the clip covers just the groups with (or without) weight decay of one optimizer; the groups left out "
            "differ in nothing else and hold other tensors of the same modules"
        ),
        summary="{by} covers some groups of {kind} only; stepped unclipped: {parts}",
        measured="in {steps:step} with limit {limit}{known:?; {share} of |g|^2 is left out|}",
        repair="clip all groups at once: clip_grad_norm_(model.parameters(), max_norm)",
    ),
    "clip_leaves_out": _seen(
        proof="one optimizer steps with clipped gradients and with gradients that no clip covers",
        summary="{by} leaves out {tensors:tensor} that {kind} steps: {parts}",
        measured="in {steps:step} with limit {limit}{known:?; {share} of |g|^2 is left out|}",
        repair=(
            "clip what the optimizer steps: clip_grad_norm_([p for g in optimizer.param_groups for p in g['params']], "
            "max_norm)"
        ),
    ),
    "clip_inside_window": _seen(
        proof="gradients are clipped, a backward pass of another batch adds to them, and they are clipped again",
        summary=(
            "{by} runs after every micro-batch, on the gradients accumulated so far: earlier micro-batches count less "
            "than the last one"
        ),
        measured=(
            "{inner} of {calls} calls with limit {limit} are followed by another batch's backward pass before the "
            "step; {bites} of them changed the gradients"
        ),
        repair="clip once, after the last micro-batch of a window and before the step",
        judged="give your function the argument accumulate=1: accumulation_equivalence shows what the clip changes",
        source="https://github.com/huggingface/transformers/issues/1563",
    ),
    "first_gradient_kept": _seen(
        proof="as in SAM, the weights move along the gradient in .grad between two backward passes of a step, and the "
        "second gradient is added to the first",
        summary=(
            "each step uses g(w) + g(w + e), the gradients before and after the move e: the first one is not zeroed"
        ),
        measured="in {steps} of {of:step} the weights moved along the gradient in .grad ({cosine}), and the second "
        "gradient was added to it",
        repair="call zero_grad() between the two backward passes: sharpness-aware steps use g(w + e) alone",
        source="https://github.com/rollovd/LookSAM/issues/3",
    ),
    "step_taken_back": _trains(
        proof="after each step the weights are pulled by one constant share towards one point that never moves",
        summary=(
            "after {often} {names} {names:move} {rate:share} of the way back towards {towards}{stuck:?: the weights "
            "never get further than a few steps from it|}"
        ),
        measured=(
            "{pulls} pulls, each by {rate:share} of the distance, which is {back:share} of the length of the last step "
            "(median)"
        ),
        shown_by=(
            "each change outside of steps is this share of the distance to one fixed point, up to rounding{to_start:?: "
            "the initial weights|}"
        ),
        repair=(
            "swap the two sides, so that the average follows the weights: average.lerp_(weight, 1 - decay), not "
            "weight.lerp_(average, ...)"
        ),
        source="https://github.com/MultimediaTechLab/YOLO/issues/97",
    ),
}

found = finding_maker(CAUSES)
