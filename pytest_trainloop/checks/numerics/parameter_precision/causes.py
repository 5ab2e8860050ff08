"""The causes of ``parameter_precision``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_lost = partial(
    Cause,
    repair="keep the weights in float32 and compute under autocast, or give the optimizer float32 master weights",
    change=("cast", "module"),
    shown_by="the same steps made in float64 from the same values move these entries, by less than their rounding",
)
_TWIN = {
    "shown_by": (
        "{steps} steps on the same gradient move these entries by four ULPs or more in float32, and leave their bits "
        "in {dtype} as they are"
    ),
}
_OVERWRITTEN = {
    "shown_by": (
        "each step finds in the float32 master what the step before left in it, rounded to {dtype}: the values of this "
        "copy"
    ),
    "repair": "copy the weights to the masters once, before the loop",
}
_TENSOR = (
    "{tensor}: {part:.0%} in {steps} steps, typical update {update:.1e}, ULP of {dtype} there {ulp:.1e}"
    "{state:?, state in {state}|}"
)
_LOST = (
    "{mostly:?{number:.0%} of all updates of {dtype} weights are lost to rounding, most of them in {names}|"
    "{names} {several:?lose|loses} {part:.0%} of the updates to rounding in {dtype}}"
)

CAUSES = {
    "updates_lost": _lost(
        proof="most entries keep their bits, and the same steps move them without rounding",
        summary=_LOST,
        measured="{number:.0%} of the updates of {tensors} tensors; " + _TENSOR,
        explains=("overfit_one_batch", "update_ratio", "precision_parity"),
        variants={
            "twin": _TWIN,
            "overwritten": {
                "summary": _LOST + ": their float32 masters are overwritten with them between steps",
                **_OVERWRITTEN,
            },
        },
        source="https://github.com/pytorch/ao/pull/1124",
    ),
    "updates_lost_in_part": _lost(
        proof="some entries keep their bits, and the same steps move them without rounding",
        summary="{number:.0%} of all updates of {dtype} weights are lost to rounding",
        measured="{number:.0%} of the updates, {size:.0%} of their summed size; " + _TENSOR,
        variants={"twin": _TWIN, "overwritten": _OVERWRITTEN},
        source="https://github.com/tenstorrent/tt-metal/pull/15518",
    ),
    "average_lost": Cause(
        proof="the same run in float64 moves the average by less than half a ULP of its dtype each time",
        summary=(
            "{names} {several:?average|averages} trained weights in {dtype} and never {several:?move|moves}: weight "
            "{weight:.1g} of each update is below its rounding"
        ),
        measured=(
            "weight {weight:.1g}, bit-equal after {steps} steps; {tensor}: an update moves it by at most "
            "{largest:.1e}, its ULP is {ulp:.1e}; it moves once the weight is {needed:.1f} times its own size away"
        ),
        shown_by="the same run in float64 moves it by this share of the distance, which this dtype cannot hold",
        repair="keep the averaged copy in float32 (AveragedModel of a float32 model, or float32 masters of its own)",
        change=("module", "first argument", "seen"),
        variants={
            "running value": {
                "summary": (
                    "{names} {names:are} kept in {dtype} and never {several:?move|moves}: each update is below its "
                    "rounding"
                ),
                "measured": (
                    "bit-equal after {steps} steps; {tensor}: an update moves it by at most {largest:.1e}, its ULP is "
                    "{ulp:.1e}"
                ),
                "shown_by": (
                    "the same run in float64 moves it at every step; begun an eighth of its size away, it has the same "
                    "bits {displaced} steps later"
                ),
                "repair": "keep the running value in float32: .float() where it is made, and no .to(dtype) after it",
            }
        },
        source="https://github.com/d8ahazard/sd_dreambooth_extension/pull/1417",
    ),
}

found = finding_maker(CAUSES)
