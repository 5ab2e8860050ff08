"""The causes of ``overfit_one_batch``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.core.registry import Cause, finding_maker

OF_EVERY_CALL = ("start", "end", "steps", "reference", "lr", "descent")
"""Facts of every run on one batch, and of plain Adam."""

_RUN = "loss {start:.4g} at the start, {end:.4g} after {steps} steps"
_REACHED = f"{_RUN}; plain Adam (lr {{lr:g}}) comes to {{reference:.4g}}"
_AT_RATE = "at {factor:g} times the learning rate the batch is learned in {learned_in} steps"
_HELD = "with the learning rate held at its peak the batch is learned in {learned_in} steps"
_FOLLOWS = ("update_ratio",)
_STEPS = 'overfit_one_batch={"steps": 400} declares in how many steps it must be learned'

CAUSES = {
    "nan_once_learned": Cause(
        proof="on one fixed batch the loss falls and is NaN from some step on, by an operation whose inputs are finite",
        summary="on one fixed batch the loss falls and is not finite from step {lost_at} on: {origin} makes {value} of "
        "finite values",
        measured="loss {start:.4g} at the start, {last:.4g} in step {before}; it was backpropagated, and no weight is "
        "lost",
        shown_by="in a further run on this batch it is the first operation whose result is not finite while all its "
        "inputs are",
        explains=_FOLLOWS,
        change=("seen",),
        variants={
            "weights lost": {
                "measured": "loss {start:.4g} at the start, {last:.4g} in step {before}; {lost} parameters hold NaN or "
                "inf after it"
            }
        },
        source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/107",
    ),
    "input_unused": Cause(
        proof="plain Adam goes the same way whatever row comes with a label, and no further than with one row",
        summary="the model cannot use its input: whatever the rows hold, the loss is the same",
        measured="plain Adam comes from {start:.4g} to {reference:.4g}, with all rows equal to {equal_rows:.4g}",
        shown_by="with each row in its neighbour's place and the labels in theirs, the loss goes the same way",
        repair=(
            "look for what makes rows equal: shapes (N, 1) against (N,) that broadcast in the loss, units that are all "
            "dead or saturated, a mask that hides everything, integers that were divided (uint8 // 255)"
        ),
        explains=_FOLLOWS,
        variants={
            "lost before": {
                "summary": "the model cannot use its input: all rows that reach its first layer are the same",
                "measured": "plain Adam comes from {start:.4g} to {reference:.4g}",
                "shown_by": "the rows of the batch differ, and those that come in at layers with weights do not",
            }
        },
        source="https://github.com/IntelLabs/matsciml/pull/347",
    ),
    "lr_decays_too_early": Cause(
        proof="the learning rates add up to a few steps at their peak, and held there they learn the batch",
        summary="lr is below a hundredth of its peak from step {gone} on, before the batch is learned",
        measured=f"{_REACHED}; lr {{peak_lr:.1e}} at its peak in step {{peak_at}}, {{gone_lr:.1e}} in step {{gone}}, "
        "{last_lr:.1e} at the end: all steps add up to {whole:.1f} at the peak",
        repair="step the schedule as often as it counts (once an epoch?), or give it its lengths in optimizer steps",
        explains=_FOLLOWS,
        change=("scheduler", "optimizer"),
        judged=_STEPS,
        variants={"held": {"shown_by": _HELD, "tried": _HELD}},
        source="https://github.com/jaehyunnn/ViTPose_pytorch/issues/20",
    ),
    "gradients_clipped_away": Cause(
        proof="gradients are clipped to a hundredth or less; higher learning rates, which undo that, learn the batch",
        summary="the clip leaves {share:.1g} of the gradient, and the loop does not learn its batch",
        measured=f"{_REACHED}; the clip's bound is {{limit:g}}, its share {{share:.1g}}",
        shown_by=_AT_RATE,
        repair="clip at the size of ordinary gradients (1.0 for most models), or raise the learning rate",
        explains=_FOLLOWS,
        source="https://github.com/strands-labs/robots/pull/2028",
        change=("bound of clip", "seen"),
    ),
    "not_learning": Cause(
        proof="steps lead up the gradient, or other learning rates learn the batch, or an earlier check says why",
        summary="one fixed batch is not learned at this learning rate, and is at {factor:g} times as much",
        measured=_REACHED,
        shown_by=_AT_RATE,
        repair="see update_ratio",
        change=("step", "optimizer"),
        variants={
            "follows": {
                "summary": "one fixed batch is not learned; {by} says why: {said}",
                "measured": _RUN,
                "shown_by": "{by} finds {slug} in the same loop",
            },
            "astray": {
                "summary": "the optimizer does not lower the loss of one fixed batch: its steps lead up the gradient",
                "shown_by": "plain Adam learns with the same model and data; the direction agreement between the "
                "loop's steps and the way down the gradient is {descent:.2f} in the mean (1 = same, -1 = opposite)",
                "repair": "look at the sign of the update, at what it is applied to, and at what writes the weights "
                "afterwards",
            },
            "rate 0": {
                "summary": "one fixed batch is not learned: the learning rate is 0 in all of {steps} steps",
                "shown_by": "plain Adam learns with the same model and data",
            },
            "eps": {
                "summary": "one fixed batch is not learned with eps = {eps:g}, and is with a usual one",
                "shown_by": "with eps = 1e-8 in its place the batch is learned in {learned_in} steps",
            },
        },
    ),
    "update_undone": Cause(
        proof="steps move the weights, and each finds them bit for bit where the first had found them",
        summary="every update is undone before the next step: the weights are always where they began",
        measured=_RUN,
        repair="look for what writes the weights after the step: a load_state_dict, an average copied back, a restore",
        explains=_FOLLOWS,
        change=("loaded",),
        source="https://github.com/MultimediaTechLab/YOLO/issues/97",
    ),
    "weight_decay_dominates": Cause(
        proof="the batch is learned once weight decay is off, with nothing else changed",
        summary="weight decay of {decay:g} dominates the gradient: the loop does not learn its batch",
        measured=_REACHED,
        shown_by="without decay, and with nothing else changed, the batch is learned in {learned_in} steps",
        repair="a smaller weight_decay (AdamW's default is 0.01; each step takes lr * weight_decay off the weights)",
        explains=_FOLLOWS,
        change=("optimizer",),
        variants={"undecayed": {"tried": "with weight_decay=0 the batch is learned in {learned_in} steps"}},
        source="https://github.com/tinghuiz/SfMLearner/issues/34",
    ),
    "learns_slowly": Cause(
        proof="the loss stays on a plateau in steps in which plain Adam goes much further",
        summary="one fixed batch is learned slowly: the loss falls only {progress:.0%} as far as with plain Adam",
        measured=f"{_REACHED}; this loop's learning rate is {{largest_lr:.1e}} at most",
        shown_by="{why}",
        repair="another learning rate, or momentum",
        change=("optimizer",),
        judged=_STEPS,
        source="https://github.com/emalgorithm/structured-neural-summarization-replication/issues/3",
    ),
}
found = finding_maker(CAUSES)
