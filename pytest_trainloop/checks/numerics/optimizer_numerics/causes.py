"""The causes of ``optimizer_numerics``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_numbers = partial(
    Cause, explains=("finite", "overfit_one_batch", "update_ratio", "precision_parity", "every_param_moves")
)
_DIVIDED = (
    "step {step}: {count} of {entries} entries of {first} are not finite after it{without:?, {without} of them with a "
    "gradient of exactly 0 (0/0)|}; their second moment is 0 in {dtype}"
)
_NARROWED = {
    "state in float16": {
        "measured": f"{_DIVIDED}; the loop keeps {{state}} in {{dtype}}, and the weights are {{weights}}",
        "repair": "keep {state} in {weights} (or bfloat16): leave out the cast of the state; or eps=1e-4",
    }
}
"""The weights are in another dtype than float16: the loop casts the state, torch creates it in the dtype of these."""

CAUSES = {
    "eps_underflows": _numbers(
        proof="eps is 0 in the dtype of the state, and a step divides by a second moment that is 0",
        summary="{kind} divides by zero at {names}: eps = {eps:g} is 0 in {dtype}, the dtype of its second moment",
        measured=_DIVIDED,
        shown_by="parameter and gradient were finite before the step, and the second moment of these entries is 0",
        repair="keep weights and optimizer state in float32 and compute under autocast; or eps=1e-4, or fused=True",
        change=("cast", "optimizer"),
        variants=_NARROWED
        | {
            "no harm so far": {
                "summary": "eps = {eps:g} of {kind} is 0 in {dtype}, the dtype of its second moment",
                "measured": "{tensors:tensor}; the smallest number above 0 in {dtype} is {least:.0e}; none was divided "
                "by 0",
                "shown_by": "the conversion of eps to that dtype",
            }
        },
        source="https://github.com/afiaka87/glide-finetune/issues/5",
    ),
    "eps_missing": _numbers(
        proof="eps is 0, and a step divides by a second moment that is 0",
        summary="{kind} divides by zero at {names}: eps = 0, and the second moment is 0",
        measured=_DIVIDED,
        shown_by="parameter and gradient were finite before the step, and the second moment of these entries is 0",
        repair="give eps a value above 0 (Adam's default is 1e-8)",
        change=("optimizer",),
        variants=_NARROWED,
        source="https://github.com/ml-explore/mlx/pull/3712",
    ),
    "step_count_saturates": Cause(
        proof="1 added to the step count gives the same count, in the dtype that it is kept in",
        summary="{kind} counts the steps of {names} in {dtype}, where {last} + 1 is {last}",
        measured="state['step'] is a {dtype} tensor for {tensors:parameter}; bias corrections stop at step {last}",
        shown_by="the next number after {last} in {dtype} is {next}",
        repair="keep state['step'] in float32, as torch creates it, where the state is written, loaded or cast",
        explains=("update_ratio",),
        change=("cast",),
        source="https://github.com/pytorch/ao/pull/4915",
    ),
    "steps_miscounted": _numbers(
        proof="the steps of the project's own Adam are Adam's with another count of steps, and not with the right one",
        summary="the bias correction of {kind} is that of step 1 in every step: the count of steps is never kept",
        measured=(
            "{steps} steps of {tensors:tensor} are Adam's with 1 in place of the count; with betas ({b1:g}, {b2:g}) "
            "later steps become {by:.2g} times those of Adam{kept:?; constant in the state: {kept}|}"
        ),
        shown_by="the same steps in float64: equal with this count, and not with the right one",
        repair="write the count back into the state: state['step'] += 1 before the correction reads it",
        change=("count of steps", "step"),
        variants={
            "by tensor": {
                "summary": "{kind} adds 1 to its count of steps at every tensor: its bias correction ends too early",
                "measured": (
                    "{steps} steps of {tensors:tensor} are Adam's with a count that each of {of} tensors raises by 1"
                ),
                "repair": "add 1 once in a step, before the loop over the parameters, or keep a count for each tensor",
            }
        },
        source="https://github.com/allenai/OLMo-core/pull/317",
    ),
    "option_without_effect": Cause(
        proof="the same run with another value of the option gives the same weights, bit for bit",
        summary="{option}={value:g} of {kind} has no effect",
        measured="{steps:step} with {option}={other:.3g} give the {tensors:tensor} that {value:g} gives, bit for bit",
        shown_by="the run was made again, and the option had the other value in each step",
        repair="read the option where the update is computed, and before anything else has used what it changes",
        variants={
            "rounded": {
                "summary": "{option}={value:g} of {kind} has no effect on parameters in {low}: rounding removes it",
                "shown_by": "the run was made again without the decay: weights and optimizer state are the same",
                "repair": (
                    "compute decay and update together in float32 and round their sum to {low}, or keep the parameters "
                    "in float32"
                ),
            }
        },
        change=("option", "step"),
        source="https://github.com/juntang-zhuang/Adabelief-Optimizer/pull/33",
    ),
    "betas_swapped": Cause(
        proof="copies stepped without gradients make ever larger steps",
        summary="betas = ({b1:g}, {b2:g}) of {kind}: steps grow where gradients vanish",
        measured=(
            "b1 / sqrt(b2) = {ratio:.3f}, above 1; on copies without gradients the largest step is {by:.3g} times the "
            "first, after {after} steps"
        ),
        shown_by="with no gradient the second moment decays faster than the first",
        explains=("finite", "overfit_one_batch", "update_ratio"),
        change=("optimizer",),
        source="https://github.com/mila-iqia/blocks/issues/1159",
    ),
    "variants_differ": _numbers(
        proof="the same steps on copies in float64 give another result",
        summary=(
            "the {every} step of {kind}{in_use:?|, which this loop does not use,} gives a wrong {tensor} in {dtype}"
        ),
        measured=(
            "{step}: {finite:?off by {error:.1e}|not finite} after two steps, where the largest update is "
            "{update:.1e} and rounding allows {allowed:.1e}{right:?; {right} right|}{peaks:?; peak memory: {peaks}|}"
        ),
        shown_by="the same two steps on copies in float64, by the for-loop",
        repair="keep weights and optimizer state in float32 and compute under autocast",
        change=("cast", "optimizer"),
        source="https://github.com/pytorch/pytorch/issues/191763",
    ),
}

found = finding_maker(CAUSES)
