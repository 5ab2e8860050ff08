"""The causes of ``checkpointing_equivalence``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_differs = partial(Cause, measured="{measured}", explains=("overfit_one_batch", "update_ratio"), change=("seen",))

DIFFER = (
    "{both:?loss {off:.9g} both ways|loss {on:.9g} with checkpointing and {off:.9g} without}; the gradients differ by "
    "{difference:share} of their size, {direction}, in {parameters} parameters, {precision}"
)
RAISED = "with checkpointing fit raises {raised}; without it does not"
PLAIN_RAISED = "with checkpoints as plain calls fit raises {raised:.160}"
"""What ``measured`` says."""

BACKWARD_FIRST = (
    "call backward() before anything changes what the checkpointed function reads (an optimizer's step, a write in "
    "place)"
)
"""The repair of a tensor that changed before its backward pass."""

_KEEP_OUT = (
    "keep norms with running statistics out of checkpointed functions; or give them a momentum of "
    "1 - sqrt(1 - momentum), which settles it"
)
_DRAW_BEFORE = (
    "draw before the checkpoint and pass the result as an argument, or draw from torch's own generator, which "
    "checkpoint() preserves"
)
_TORCHS = "leave preserve_rng_state=True (in a recomputation of your own, save and restore torch's state)"
_OTHER_STATE = "the recomputation of a checkpointed function finds another state than the forward pass"
_RULED_OUT = "; ruled out: generators of random numbers, inputs that require no grad"

CAUSES = {
    "inputs_need_grad": _differs(
        proof="the gradients are the same once the re-entrant checkpoints whose inputs require no grad are plain calls",
        summary="{names} {several:?get|gets} {part:?only a part of the gradient|no gradient} under a re-entrant "
        "checkpoint whose inputs require no grad",
        shown_by="no input of some re-entrant checkpoints requires grad; with these alone as plain calls the "
        "gradients are those without checkpointing",
        repair="checkpoint(..., use_reentrant=False); or make the segment's inputs require grad "
        "(enable_input_require_grads)",
        explains=(
            "gradient_reaches_every_param:graph_cut",
            "gradient_reaches_every_param:parameter_unused",
            "every_param_moves:not_updated",
            "overfit_one_batch",
            "update_ratio",
        ),
        source="https://github.com/huggingface/transformers/issues/21381",
    ),
    "rng_not_preserved": _differs(
        proof="the gradients are the same once the states of generators are restored for the recomputation",
        summary="checkpointing does not restore {names}: the recomputation in the backward pass draws other random "
        "numbers than those that made the loss",
        shown_by="with {names} restored for the recomputation, the gradients are those without checkpointing",
        repair=_DRAW_BEFORE,
        variants={
            "torch's": {"repair": _TORCHS},
            "own recomputation": {
                "shown_by": "both ways make the same loss, and without random numbers the same gradients",
                "repair": _TORCHS,
            },
            "own generator": {"repair": _DRAW_BEFORE + ", or restore its state yourself"},
        },
        source="https://github.com/openai/guided-diffusion/issues/167",
    ),
    "side_result_cut": _differs(
        proof="the gradients are the same once non-reentrant checkpoints take the place of re-entrant ones",
        summary="{names} {several:?lose|loses} a part of the gradient under a re-entrant checkpoint: results that its "
        "function stores instead of returning, or takes in nested containers, have no history",
        shown_by="with non-reentrant checkpoints in their place the gradients are those without checkpointing, and "
        "the recomputation repeats the forward pass",
        repair="checkpoint(..., use_reentrant=False); or return from the function what the loss depends on (an "
        "auxiliary loss), instead of keeping it in a list or an attribute",
        source="https://docs.pytorch.org/docs/stable/checkpoint.html",
    ),
    "state_changed": _differs(
        proof="the loss is the same, the gradients are not, also with every generator restored: the recomputation "
        "finds another state",
        summary=_OTHER_STATE,
        shown_by="the first call that differs is not determined" + _RULED_OUT,
        repair="change no state inside a checkpointed function (counters, caches, buffers, its inputs): read it "
        "before, pass it as an argument, write it after",
        variants={
            "another result": {
                "summary": _OTHER_STATE + ": {call}",
                "shown_by": "the recomputation gives another result of {call} (by up to {by:.2g})" + _RULED_OUT,
            },
            "another call": {
                "summary": _OTHER_STATE + ": {call}",
                "shown_by": "the recomputation calls {instead} in place of {call}" + _RULED_OUT,
            },
        },
        source="https://github.com/shihao1895/MemoryVLA/issues/18",
    ),
    "other_computation": _differs(
        proof="the loss of the first forward pass already differs, or gradients do without any random numbers",
        summary="the loop computes another loss with checkpointing than without{left_out:?: {left_out} "
        "{several:?get|gets} a gradient without it only|}",
        shown_by="the loss of the first forward pass differs, before any recomputation",
        repair="run the same modules in the same order with the same arguments in both ways (masks, flags, the last "
        "layer), and decide nothing by torch.is_grad_enabled()",
        variants={
            "same loss": {
                "summary": "the loop's own recomputation gives other gradients for the same loss",
                "shown_by": "the loss is the same and the gradients are not, also without random numbers",
            },
        },
        source="https://github.com/lightly-ai/lightly/issues/2049",
    ),
    "statistics_updated_twice": Cause(
        change=("seen",),
        proof="gradients agree, and buffers end with other values than without checkpointing",
        summary="{names} {names:are} updated once more each time that a checkpoint recomputes its function",
        measured="{buffer} is {on:.6g} with checkpointing and {off:.6g} without; the gradients agree",
        shown_by="with every checkpoint as a plain call they end with other values, and two runs with checkpointing "
        "agree",
        repair=_KEEP_OUT,
        variants={
            "no knob": {"repair": _KEEP_OUT + "; a test with a knob checkpoint= that is True or False fails for it"},
        },
        source="https://github.com/pytorch/pytorch/issues/96136",
    ),
}

found = finding_maker(CAUSES)
