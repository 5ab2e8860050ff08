"""The causes of ``step_order`` that lie in clips, and in what stands in ``.grad`` beside the gradient of one batch."""

from __future__ import annotations

from pytest_trainloop.checks.wiring.consequences import TRAINING
from pytest_trainloop.registry import Cause

CLIP_CAUSES = {
    "clips_nothing": Cause(
        proof="no call of the clip finds a gradient that a step uses, and what is stepped is covered by no other clip",
        repair="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) between backward() and step()",
        explains=("finite", "update_ratio"),
        change=("seen",),
    ),
    "clips_another": Cause(
        proof=(
            "what the clip is handed is used by no step before it is zeroed, and the step that follows each call uses "
            "gradients that no clip of the run covers"
        ),
        repair="hand the clip the parameters of the optimizer that steps next",
        explains=("finite", "update_ratio"),
        change=("seen",),
        settle="clip each network on a line of its own, before its own step",
    ),
    "clips_one_group": Cause(
        proof=(
            "the clip covers just the groups with (or without) weight decay of one optimizer; the groups left out "
            "differ in nothing else and hold other tensors of the same modules"
        ),
        repair="clip all groups at once: clip_grad_norm_(model.parameters(), max_norm)",
        explains=("finite", "update_ratio"),
        change=("seen",),
    ),
    "clip_leaves_out": Cause(
        proof="steps use gradients that no clip covers beside those of the same optimizer that one does",
        repair="clip_grad_norm_(model.parameters(), max_norm), or every group of the optimizer",
        change=("seen",),
    ),
    "clip_inside_window": Cause(
        proof="gradients are clipped, a backward pass of another batch adds to them, and they are clipped again",
        repair="clip once, after the last micro-batch of a window and before the step",
        change=("seen",),
        settle="give your function the argument accumulate=1: accumulation_equivalence shows what the clip changes",
    ),
    "first_gradient_kept": Cause(
        proof="between two backward passes before one step the weights moved along what already stood in .grad",
        repair="zero_grad() between the two: sharpness-aware steps use g(w + e) alone",
        change=("seen",),
    ),
    "step_taken_back": Cause(
        proof="after each step the weights are pulled by one constant share towards one point that never moves",
        repair=(
            "swap the two sides where an average is to follow the weights: "
            "average.lerp_(weight, 1 - decay), not weight.lerp_(average, ...)"
        ),
        explains=TRAINING,
        change=("seen",),
    ),
    "leaks_into_next": Cause(
        proof=(
            "at the first backward pass of a second call of fit .grad is not empty, and the first step uses "
            "more backward passes than any other"
        ),
        repair="step at the last batch too: if (i + 1) % accumulate == 0 or i + 1 == len(batches)",
        explains=TRAINING,
        change=("seen",),
        settle="give batches= as in the real run: where their number divides, nothing is left",
    ),
}
