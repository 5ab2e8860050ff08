"""The causes of ``grad_scaler``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

EXPLAINS = (
    "step_order:clip_after_step",
    "step_order:stepped_twice",
    "step_order:zeroed_before_step",
    "finite",
    "parameter_precision",
    "optimizer_numerics",
    "accumulation_equivalence",
    "overfit_one_batch",
    "update_ratio",
    "every_param_moves",
    "precision_parity",
)

_seen = partial(Cause, change=("seen",), explains=EXPLAINS)
_JUDGED = "a knob precision= that switches the scaler on has it judged there, as a fault"
_READS = "three runs at three scales, all else equal: the gradient that the step reads"
_FALLS = f"{_READS} falls as the scale grows"

CAUSES = {
    "update_missing": _seen(
        proof="the scaler steps again and again and is never updated",
        summary="scaler.{call}() is called again and again without scaler.update(): the scale is never adjusted",
        measured="{steps:scaler step}, 0 updates",
        shown_by="no update was seen in the run",
        repair="call scaler.update() once at the end of each iteration that steps",
        judged=_JUDGED,
        variants={
            "refused": {
                "summary": "scaler.{call}() is called again without scaler.update(): torch refuses to go on",
                "shown_by": "torch raised: {raised}",
            },
        },
        source="https://github.com/Azure/MS-AMP/pull/45",
    ),
    "update_twice": _seen(
        proof="the scaler is updated again with no step since the last update, and torch refuses",
        summary=(
            "scaler.update() is called {between:?in an iteration in which scaler.step() is not|twice after one step}"
        ),
        measured="at {first}, then at {then}, no scaler.step() between",
        shown_by="torch raised: {raised}",
        repair="call scaler.update() once, right after the steps of an iteration that makes them",
        source="https://github.com/neosr-project/neosr/pull/9",
    ),
    "update_between": _seen(
        proof="a scale that grows in the update between backward and step changes the gradient that the step reads",
        summary=(
            "scaler.update() runs between the backward pass and the step of {kind}: its gradients are unscaled "
            "{early:?twice|by another scale}"
        ),
        measured="where the scale doubles in this update, the step reads {factor} times the gradient",
        shown_by=(
            "two runs, with a scale that grows at every update and with a constant one; update at {first}, step at "
            "{then}"
        ),
        repair="call scaler.update() once, after the steps of all optimizers whose gradients were made at this scale",
        source="https://github.com/huggingface/accelerate/issues/439",
    ),
    "unscaled_twice": _seen(
        proof="unscale_ is called on gradients that are unscaled already, and torch refuses",
        summary="{names} is called twice before scaler.update(){between:?, with another backward pass in between|}",
        measured="first at {first}, then at {then}",
        shown_by="torch raised: {raised}",
        repair="unscale once, before scaler.step(optimizer)",
        variants={
            "after step": {
                "summary": "{names} is called after scaler.step(optimizer), which has unscaled these gradients already",
            },
        },
        source="https://github.com/huggingface/transformers/issues/24449",
    ),
    "unscaled_inside_window": _seen(
        proof="the gradient that the step reads depends on the scale, and a backward pass came after unscale_",
        summary=(
            "scaler.unscale_() runs before the last backward pass of a step: later gradients are added with their scale"
        ),
        measured="{halved}; unscale_ at {first}, then backward at {then}",
        repair="unscale once, after the last backward pass and before clipping",
        source="https://github.com/pytorch/pytorch/pull/36601",
    ),
    "clip_before_unscale": _seen(
        proof="gradients are clipped while they still carry the loss scale",
        summary=(
            "gradients are clipped while they still carry the loss scale{known:? of {scale}|}"
            "{enabled:?|, wherever the scaler is enabled}: the limit is "
            "{known:?{scale} times too low|too low by this scale}"
        ),
        measured=(
            "limit {limit} on gradients{known:? times {scale}|}, in {steps:step}"
            "{enabled:?| (this scaler is disabled here)}"
        ),
        shown_by="order seen: scale, backward, clip, with no unscale_ between backward and clip",
        repair="call scaler.unscale_(optimizer) before clipping",
        judged=_JUDGED,
        variants={
            "partial": {
                "summary": (
                    "gradients of {carrying} are clipped while they still carry the loss scale{enabled:?|, wherever "
                    "the scaler is enabled}: the others hardly count in the norm"
                ),
                "shown_by": (
                    "order seen: scale, backward, clip, with no unscale_ between backward and clip for {holders}, "
                    "which holds them"
                ),
                "repair": "call scaler.unscale_(optimizer) before clipping, for every optimizer",
            },
            "to a size": {
                "summary": (
                    "gradients are brought to a fixed size while they still carry the loss scale: unscaling then makes "
                    "them too small by this factor"
                ),
                "measured": "{halved}",
                "shown_by": _FALLS,
            },
        },
        source="https://github.com/milesial/Pytorch-UNet/issues/468",
    ),
    "not_unscaled": _seen(
        proof="the gradient that a direct optimizer.step() reads grows with the loss scale",
        summary=(
            "{kind}.step() is called directly on gradients that carry the loss scale: {whole:?the whole|a part of the} "
            "gradient is multiplied by the scale"
        ),
        measured="{halved}",
        shown_by=f"{_READS} grows with the scale",
        repair="scaler.step(optimizer) in place of optimizer.step(), or scaler.unscale_(optimizer) before it",
        source="https://github.com/nerfstudio-project/nerfacc/issues/307",
    ),
    "not_scaled": _seen(
        proof="the gradient that the step reads has a part that falls as the loss scale grows: it was never scaled",
        summary=(
            "gradients of {changed} that were never scaled are unscaled all the same: {whole:?the whole|a part of the} "
            "gradient is divided by the scale"
        ),
        measured="{halved}; {losses:loss} scaled, {passes:backward pass} in the run",
        shown_by=_FALLS,
        repair="scaler.scale(loss).backward() for every loss whose gradients scaler.step(optimizer) unscales",
        variants={
            "refused": {
                "summary": "scaler.{call}() has nothing to unscale: no loss was ever scaled, and torch refuses",
                "measured": "0 losses scaled, {passes:backward pass}",
                "shown_by": "torch raised: {raised}",
                "repair": "scaler.scale(loss).backward() in place of loss.backward()",
            },
        },
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/4148",
    ),
    "scale_in_loss": _seen(
        proof="the gradient that the step reads changes when only the scale is halved, in float32 without autocast",
        summary=(
            "the gradient that {kind} reads depends on the loss scale: "
            "{used:?a scaled gradient enters the loss|it, or the weights, were changed by a scaled one}"
        ),
        measured=(
            "with the scale halved from 1024 it changes by {by:share} of its length, in float32"
            "{moved:?, and weights are moved by hand before the step|}"
        ),
        shown_by="two runs without autocast at two scales, all else equal: halving the scale is exact there",
        repair=(
            "divide a gradient by scaler.get_scale() before it is used; where it is read from .grad, call "
            "scaler.unscale_(optimizer) before"
        ),
        explains=(*EXPLAINS, "loss_at_init"),
        source="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty",
    ),
    "another_scaler": _seen(
        proof="halving the scale of one scaler alone halves, or doubles, the gradient that the step reads",
        summary=(
            "the gradients that this step of {kind} reads are scaled by one GradScaler and unscaled by another: they "
            "are right only while both have the same scale"
        ),
        measured=(
            "with the scale of one scaler alone halved (number {number} of those built), the step reads {factor} times "
            "the gradient; scaled at {first}"
        ),
        shown_by="two runs that differ in the scale of one scaler",
        repair="scale the loss and step its optimizer with the same scaler; one scaler for all optimizers will do",
        source="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#working-with-multiple-models-losses-and-optimizers",
    ),
    "scaler_recreated": _seen(
        proof="every step has its own scaler, so no scale ever adapts",
        summary="every step has a new GradScaler, whose scale can never adapt to the gradients",
        measured="{steps} scalers for {steps:step}; {trace}",
        shown_by="each scaler stepped once and another took its place",
        repair="build one GradScaler before the loop, and keep it (its state too) for the whole training",
        change=("scaler", "seen"),
        variants={
            "lost": {
                "summary": (
                    "every step has a new GradScaler: {skipped} of {steps} steps are skipped, and the scale never "
                    "adapts"
                ),
            },
        },
        source="https://github.com/conservationtechlab/animl-py/issues/298",
    ),
    "scale_collapsed": _seen(
        proof="the scale falls without end, and steps are skipped as often at the lowest scale of all",
        summary=(
            "the loss scale falls without end, and {skipped} of {steps} steps are skipped: gradients are not finite at "
            "any scale"
        ),
        measured="{trace}; {skipped_lowest} of {tries} skipped in a run from scale 2^-24",
        shown_by="at the lowest scale as many steps are skipped, so it is not the scale that overflows{origin}",
        repair="fix the operation that is not finite",
        do_not="skip such batches: the operation stays wrong, and these rows teach nothing",
        explains=("overfit_one_batch", "update_ratio", "every_param_moves:not_updated"),
        source="https://github.com/deepinsight/insightface/issues/2262",
    ),
}

found = finding_maker(CAUSES)
