"""The causes of ``target_networks``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_seen = partial(Cause, change=("seen",))

CAUSES = {
    "copied_into_itself": _seen(
        proof="source and target of the write share memory: the write can never change a value",
        summary="the update writes {names} onto {several:?themselves|itself}: it does nothing",
        measured="{writes:write} in {steps:step}, each from the memory that it writes to",
        repair=(
            "give the two networks weights of their own, target = copy.deepcopy(online), and copy from the online one"
        ),
        explains=("evaluation_is_pure", "resume_equivalence:live_references"),
        variants={
            "put back": {
                "summary": "the saved values of {names} were kept without a copy: restoring them writes the current "
                "values",
                "repair": "kept = copy.deepcopy(model.state_dict()): state_dict() gives the weights themselves",
            }
        },
        source="https://github.com/pytorch/tutorials/pull/188",
        change=("copied", "seen"),
    ),
    "target_rebound": _seen(
        proof="a line ran another network without gradients, and runs the trained one of the same shape ever since",
        summary="from step {step} on this line runs {online}, which trains, and {target} no longer runs: both names "
        "are now one network",
        measured="{before:forward pass} of {target}, then {after:forward pass} of {online}",
        repair="copy the values, target.load_state_dict(online.state_dict()), and do not assign the network itself",
        source="https://github.com/andri27-ts/Reinforcement-Learning/issues/14",
    ),
    "target_left_behind": _seen(
        proof="a copy of a trained network never changes, and the copy used together with it follows its own network",
        summary="{network} is never updated and keeps the initial values of {source}, while {other}, used with it, "
        "follows its own network",
        measured="in {steps:step} no line writes to {network}, and user code updates {other}",
        repair="update it where the other copy is updated",
        source="https://github.com/kakaoenterprise/JORLDY/issues/120",
    ),
    "average_dropped": _seen(
        proof="averages with the trained weights are computed, nothing reads them, and the other weights never change",
        summary="each step averages {names} with the trained weights and discards the result: {names:they} never "
        "{several:?change|changes}",
        measured="{averages:average} in {steps:step}, none of which is read",
        repair="slow.copy_(average), or slow.lerp_(fast, 1 - decay), under torch.no_grad()",
        source="https://github.com/AgileRL/AgileRL/pull/464",
    ),
    "average_moves_away": _seen(
        proof="each update multiplies the difference between the average and the weights by a number above 1",
        summary="the average of {names} moves away from {several:?them|it}: the difference grows at each update",
        measured="each update multiplies the difference by {factor:.4g}; {writes:update} in {steps:step}",
        repair="average.lerp_(weight, 1 - decay), or average.sub_((average - weight) * (1 - decay))",
        source="https://github.com/ostris/ai-toolkit/issues/1034",
    ),
    "anchor_moves_along": _seen(
        change=("subtracted", "seen"),
        proof="both sides of the difference share memory in every step, and the optimizer changes it",
        summary="the reference values of {names} are not a copy: both sides share memory, and the difference is always "
        "0",
        measured="{compared:comparison} in {steps:step}, each of a weight with its own memory",
        repair="keep a copy: p.detach().clone(), or copy.deepcopy(model)",
        explains=("loss_components",),
        source="https://github.com/KarhouTam/FL-bench/issues/165",
    ),
    "dropout_in_targets": _seen(
        proof="what is backpropagated changes once dropout is off in these forward passes alone",
        summary="{names} never trains and gives targets with dropout active: they are random",
        measured="{passes:forward pass} in training mode; without dropout the first loss changes by {moved:share}",
        repair="call eval() on it before the loop, and after each train() of a module that holds it",
        explains=("loss_at_init", "frozen_stays_frozen:statistics_drift"),
        variants={
            "before fit": {
                "summary": "{names} {names:are} computed before fit by {network} with dropout active: the noise stays "
                "in the data",
                "measured": "{passes:forward pass} without gradients in training mode; without dropout the first loss "
                "changes by {moved:share}",
                "repair": "call model.eval() before this forward pass, model.train() after it",
            }
        },
        source="https://github.com/huggingface/trl/pull/5542",
        change=("network", "seen"),
    ),
    "average_for_each_micro_batch": _seen(
        proof="it moves several times between two steps, with the same weights each time",
        summary="the average of {names} moves {updates:.2g} times a step: once for each micro-batch, so its decay "
        "depends on how many there are",
        measured="{updates:.2g} updates a step over {steps:step}, with a backward pass between two of them",
        repair="move this line after optimizer.step()",
        source="https://github.com/SWivid/F5-TTS/issues/631",
        change=("call of helper", "seen"),
    ),
    "statistics_left_behind": _seen(
        proof="in evaluation mode it uses, bit for bit, the statistics that the network it follows began with",
        summary="an average follows the weights and not the buffers: in evaluation mode its batch "
        "{several:?norms|norm} {names} {several:?use|uses} mean 0 and variance 1, as made",
        measured="{passes:forward pass} in evaluation mode after {updates:update}; the running variance in the mean: "
        "{kept:.3g} in the average, {now:.3g} in the network that it follows",
        repair=(
            "copy the buffers too: for slow, fast in zip(average.buffers(), model.buffers()): slow.copy_(fast), as "
            "torch.optim.swa_utils.AveragedModel does; or call swa_utils.update_bn before the average is evaluated"
        ),
        variants={
            "of a start": {
                "summary": "an average follows the weights and not the buffers: in evaluation mode its batch "
                "{several:?norms|norm} {names} {several:?use|uses} the statistics of the start",
            }
        },
        source="https://github.com/CuriousAI/mean-teacher/issues/9",
    ),
}
found = finding_maker(CAUSES)
