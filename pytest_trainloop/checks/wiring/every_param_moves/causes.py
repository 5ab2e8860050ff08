"""The causes of ``every_param_moves``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.checks.wiring.consequences import LEARNING
from pytest_trainloop.core.registry import Cause, finding_maker

_NEVER = "{names} {names:get} gradients and never {names:move}"
_RESTS = "bit-equal after 156 steps from another start, at {raised:,.0f} times the learning rate too"

CAUSES = {
    "lost_to_rounding": Cause(
        proof="the same run in float64 moves the parameter by less than half a ULP of its dtype a step",
        summary="{names} never {names:move}: each update is below half a ULP of {dtype} and rounds away",
        measured=(
            "{unmoved} of {held} parameters bit-equal after {steps} steps; {first}: typical update {update:.1e}, ULP "
            "{ulp:.1e}"
        ),
        shown_by="the same steps in float64 move them by less than half a ULP each",
        repair="keep the weights in float32 and compute under autocast, or give the optimizer float32 master weights",
        explains=("parameter_precision", *LEARNING),
        change=("cast", "module"),
        variants={
            "full precision": {"repair": "raise the learning rate of this group, if it should train"},
        },
        source="https://github.com/vllm-project/speculators/pull/765",
    ),
    "written_to_a_copy": Cause(
        proof="in float64 the same loop moves the parameter once it lies in memory in another layout",
        summary=f"{_NEVER}: each update is written to a copy",
        measured=(
            "bit-equal after {passes} backward passes that gave a gradient, in float64 too; {first} of shape {shape}: "
            "its memory is {contiguous:?read in another order|not contiguous}"
        ),
        shown_by=(
            "the same loop moves {names:them} once the same values lie in "
            "{contiguous:?memory with the axes in reverse order|contiguous memory}"
        ),
        repair=(
            "write into the parameter: p.add_(update.view_as(p)), or p.copy_(new); p.contiguous(), p.reshape(-1) and "
            "p.flatten() give a copy where the layout of p needs one"
        ),
        explains=LEARNING,
        change=("step", "optimizer"),
        source="https://github.com/deepspeedai/DeepSpeed/pull/2489",
    ),
    "stays_at_zero": Cause(
        proof="it starts at zero, and from any small start its steps are one and the same share of its own size",
        summary=f"{_NEVER}: {{names:they}} {{names:start}} at zero, and each step is as long as the weight's own norm",
        measured=(
            "bit-equal to 0 after {steps} steps; from starts of size 1e-2 and 1e-5 a step changes {first} by "
            "{share:.2g} of it"
        ),
        shown_by="an ordinary step would change the smaller start by a thousand times that share",
        repair=(
            "a trust ratio of 1 where the norm is 0: torch.where(norm > 0, norm / update_norm, 1.0); or none for "
            "tensors with one axis"
        ),
        explains=LEARNING,
        change=("step", "optimizer"),
        source="https://github.com/cybertronai/pytorch-lamb/pull/6",
    ),
    "not_updated": Cause(
        proof="a higher learning rate from another start does not move it, and other parameters move, or none at all",
        shown_by="the step reads their gradients, at a learning rate above zero, and their values stay as they are",
        repair="go through all of the optimizer's param_groups in step()",
        explains=LEARNING,
        change=("step", "optimizer"),
        variants={
            "others move": {
                "summary": f"{_NEVER}: {{optimizers}} leaves them out",
                "measured": f"{_RESTS}; {{optimizers}} moves other parameters",
                "repair": "go through all of {optimizers}.param_groups in step()",
            },
            "none moves": {
                "summary": (
                    "no parameter moves: {optimizers} steps, and what it computes never reaches the {all} parameters"
                ),
                "measured": _RESTS,
                "repair": (
                    "change the parameters in place in {optimizers}.step() (p.add_(update), p.copy_(new)), not copies "
                    "of them"
                ),
            },
        },
        source="https://github.com/nntrainer/nntrainer/issues/241",
    ),
}

found = finding_maker(CAUSES)
