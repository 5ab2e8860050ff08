"""The causes of ``update_ratio``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.core.registry import Cause, finding_maker

OF_EVERY_CALL = ("start", "end", "steps")
"""Facts of every run on one batch."""

_SIZES = (
    "a step moves the weight matrices by {sizes} of their size at lr {lr:.1e}; loss {start:.4g} at the start, "
    "{end:.4g} after {steps} steps"
)
_TRIED = "at {factor:g} times the learning rate the batch is learned in {learned_in} steps"
_BAND = f"{_TRIED}; {{several:?lr from {{low:.0e}} to {{high:.0e}} learn it|lr {{low:.0e}} learns it}}"
_NOT_LEARNED = ("overfit_one_batch:not_learning", "overfit_one_batch:learns_slowly")

CAUSES = {
    "same_lr_for_pretrained_and_new": Cause(
        proof="weights that are the same under another seed train at the learning rate of randomly initialised ones",
        summary="{pretrained} pretrained weight matrices train at the learning rate of {names}, which {names:are} "
        "randomly initialised",
        measured="lr {lr:.1e} for all at the first step",
        shown_by="built under another seed, the former are the same bit for bit and the latter are not",
        repair="two parameter groups: a learning rate about ten times as high for what is new",
        change=("optimizer",),
        source="https://github.com/facebookresearch/detr/issues/95",
    ),
    "lr_too_low": Cause(
        proof="no step moves the weights by more than 2e-6 of their size, and higher learning rates learn the batch",
        summary="the learning rate is too low to learn: at {factor:g} times it the batch is learned",
        measured=_SIZES,
        shown_by=_BAND,
        explains=_NOT_LEARNED,
        change=("optimizer",),
        variants={
            "raised": {
                "repair": "lr={low:.0e} here; lr up to {high:.0e} learns the batch",
                "tried": "with lr={low:.0e} the batch is learned in {learned_in} steps",
            },
            "rate 0": {
                "summary": "the learning rate is 0 in all of {steps} steps",
                "shown_by": "no group of the optimizer has a learning rate above 0 at any step, and it does not rise",
                "repair": "look at what sets it: a warm-up that divides integers, a factor of 0, a schedule that has "
                "ended",
            },
        },
        source="https://cs231n.github.io/neural-networks-3/#ratio",
    ),
    "lambda_gives_the_lr": Cause(
        proof="the largest factor that the lambda of LambdaLR returns is the base rate itself, and higher rates learn",
        summary="the function of LambdaLR returns the learning rate where a factor on it is needed: {base:g} times "
        "{base:g} makes {peak:g}",
        measured=_SIZES,
        shown_by=f"its largest factor is the base rate, {{base:g}}; {_TRIED}",
        repair="let the function return a factor on the rate: LambdaLR(optimizer, lambda step: rate(step) / lr)",
        explains=(*_NOT_LEARNED, "schedule:lr_is_the_factor"),
        change=("scheduler",),
        source="https://github.com/lhoyer/MIC/issues/60",
    ),
    "eps_too_large": Cause(
        proof="no step moves the weights by more than 2e-6 of their size, and with a usual eps alone they learn",
        summary="eps = {eps:g} is so much larger than the root of the second moment that steps come to nothing",
        measured=_SIZES,
        shown_by="with eps = 1e-8 in its place and nothing else changed the batch is learned in {learned_in} steps",
        repair="eps=1e-8, or a learning rate that makes up for it: where eps dominates, steps go as lr / eps",
        explains=_NOT_LEARNED,
        change=("optimizer",),
        variants={"usual": {"tried": "with eps=1e-8 the batch is learned in {learned_in} steps"}},
        source="https://github.com/mlpnlp/mlpnlp-nmt/pull/4",
    ),
    "lr_too_high": Cause(
        proof="the loss of one batch does not fall under large steps, and only lower learning rates learn it",
        summary="the learning rate is too high: one batch's loss {rises:?rises|does not fall}, and at {factor:g} times "
        "it is learned",
        measured=_SIZES,
        shown_by=_BAND,
        explains=_NOT_LEARNED,
        change=("optimizer",),
        variants={"lowered": {"repair": "lr={high:.0e} here, or lower; or a warm-up, a clip", "tried": _TRIED}},
        source="https://github.com/juntang-zhuang/LadderNet/issues/1",
    ),
}
found = finding_maker(CAUSES)
