"""The causes of ``precision_parity``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

EXPLAINS = ("finite", "grad_scaler:scale_collapsed", "overfit_one_batch", "update_ratio", "loss_at_init")

IN_LOW_PRECISION = "the block in float32 settles it: up to twice what rounding explains passes"
UNDER_OUR_AUTOCAST = (
    "where the loop is to run in low precision, a knob precision= that its autocast follows makes this a fault"
)

_IN_FLOAT32 = "compute this block in float32: x = x.float(), under autocast(enabled=False)"

_REST = "{how}{tensor:?: the gradient of {tensor} is lost|}"
_MEASURED = (
    "{finite:?relative error of the gradient{of} {error:.2g}, rounding explains {explained:.2g}: {ratio:.3g} times as "
    "much|the gradient is inf or NaN in {dtype}, and finite in float64}"
    "{known:?; largest value there {peak:.4g} in float64|}"
    "{lost:?, {lost:.0%} of it not finite|}{vanished:?, {vanished:.0%} of it zero only in {dtype}|}"
    "{known:?; {dtype} holds {least:.2g} to {most:.6g}|}{products:?; float32 products in {products}|}"
    "{tensor:?; it is {part:.1g} of the whole gradient's length, which hides it|}"
)
_SHOWN_BY = (
    "{right:?with {where} in float32 the gradient{of} is {left:.2g} from float64, not {before}"
    "|the first operation that is farther from float64 than its inputs explain}"
)

_seen = partial(Cause, change=("seen",), explains=EXPLAINS)
_operation = partial(_seen, measured=_MEASURED, shown_by=_SHOWN_BY)

_SCALED = {
    "summary": "the gradient underflows in {dtype}: {zeros:.0%} of its entries are zero{how}",
    "shown_by": ("with the loss multiplied by {scale:g} before backward, and the gradient divided by it, they agree"),
}

CAUSES = {
    "overflow": _operation(
        proof="an operation is not finite in low precision, and finite in float64",
        summary="{what} overflows in {dtype}{backward:? in backward|}" + _REST,
        repair="scale before the product, keep this block in float32 (autocast(enabled=False), .float()), or use "
        "bfloat16",
        source="https://github.com/ultralytics/ultralytics/pull/24990",
    ),
    "underflow": _operation(
        proof="values that are not zero in float64 are zero in low precision",
        summary="{what} underflows in {dtype}: small values become zero" + _REST,
        repair="compute this block in float32, with an eps that the dtype holds, or use bfloat16",
        variants={
            "no scaler": {**_SCALED, "repair": "scale the loss (torch.amp.GradScaler), or use bfloat16"},
            "scaler disabled": {
                **_SCALED,
                "measured": f"{_MEASURED}; the loop's GradScaler is disabled: the loss is scaled by 1",
                "repair": (
                    "GradScaler(..., enabled=True) where autocast is in float16; or use bfloat16 (torch disables a "
                    "scaler for a device that the machine lacks: give it that of the model)"
                ),
            },
            "scale of one": {
                **_SCALED,
                "measured": f"{_MEASURED}; the loop's GradScaler has the scale 1",
                "repair": "GradScaler(..., init_scale=2.0**16), its default; or bfloat16",
            },
            "scale too low": {
                **_SCALED,
                "repair": (
                    "use bfloat16, or compute in float32 where values are small or large (autocast(enabled=False), "
                    ".float())"
                ),
            },
        },
        source="https://github.com/engichang1467/Open-Rig3R/issues/35",
    ),
    "cancellation": _operation(
        proof="the difference of two numbers that agree in most digits is wrong, although both numbers are right",
        summary="{what} takes the difference of numbers that {dtype} rounds to nearly the same" + _REST,
        repair=_IN_FLOAT32,
        change=("cast before", "seen"),
        source="https://github.com/NVIDIA/cuvs/issues/991",
    ),
    "accumulation": _operation(
        proof="a sum is wrong, although its terms are right",
        summary="{what} adds up in {dtype}: each term is rounded away next to the sum" + _REST,
        repair="add up in float32: keep the running sum a float32 tensor",
        source="https://github.com/huggingface/transformers/pull/8561",
    ),
    "custom_backward": _operation(
        proof="the gradient enters the backward of a custom autograd.Function right, and leaves it wrong",
        summary="the backward of {what} gives another gradient in {dtype}" + _REST,
        repair="save and compute in float32 in the Function, forward and backward; torch.amp.custom_fwd with "
        "cast_inputs=torch.float32 does it where the Function casts nothing itself",
        source="https://github.com/pytorch/pytorch/issues/87979",
    ),
    "precision_lost": _operation(
        proof="the gradient is farther from float64 than rounding explains",
        summary="{what} loses more in {dtype} than rounding explains" + _REST,
        repair=_IN_FLOAT32,
        variants={
            "no operation": {
                "shown_by": (
                    "no single operation was found that is more than ten times as far from float64 as rounding explains"
                ),
                "repair": (
                    "compute the loss in float32, then more of the calls that lead to it: x = x.float(), under "
                    "autocast(enabled=False)"
                ),
            },
        },
        change=("cast before", "seen"),
        source="https://github.com/modelscope/DiffSynth-Studio/pull/1025",
    ),
    "angles_lost": _seen(
        proof="angles of positions or timesteps, which come from no weight, are half a radian or more from float64",
        summary="{what} is given angles that {dtype} moves by half a radian or more{how}",
        measured=(
            "{part:share} of the angles are off by half a radian or more; the worst, {angle:.6g}, is off by "
            "{largest:.2g} rad"
        ),
        shown_by="the same angles in a float64 run from the same start; they come from no weight",
        repair="where positions meet frequencies, compute in float32: with torch.autocast(device, "
        "enabled=False): angles = positions.float() * frequencies.float(); round sin and cos, not the angles",
        source="https://github.com/huggingface/diffusers/issues/13920",
    ),
    "weights_cast_once": _seen(
        proof="the losses change once the weights that autocast has cast are cast again after each update",
        summary=(
            "backward pass {number} computes with weights from before an update: autocast casts each weight once, and "
            "keeps the cast until its outermost block is left"
        ),
        measured=(
            "loss {stale:.6g}, and {fresh:.6g} with the weights as they are by then{entered}"
            "{steps:?; {steps} steps are made inside of a block|}"
        ),
        shown_by="with the casts dropped whenever the weights have changed, and nothing else, the loss differs",
        repair="enter torch.autocast(...) again for each forward pass, around model and loss, and leave it before "
        "backward() and step(); cache_enabled=False where one block must span several steps",
        explains=(*EXPLAINS, "every_param_moves:not_updated", "precision_parity:backward_under_autocast"),
        source="https://github.com/X-GenGroup/Flow-Factory/pull/186",
    ),
    "backward_under_autocast": _seen(
        proof="backward is called inside the autocast block",
        summary="backward() runs inside the autocast block, which changes the gradient by {change_by:.1g} of its size",
        measured=(
            "{inside} of {passes} backward passes under {block}; relative difference of the first gradient "
            "{change_by:.1g}"
        ),
        shown_by=("with the block ended before backward, and nothing else changed, the first gradient is another one"),
        repair="end the autocast block after the loss: backward runs in the dtypes that forward chose",
        variants={
            "no change": {
                "summary": "backward() runs inside the autocast block, which torch advises against",
                "measured": "{inside} of {passes} backward passes under {block}",
                "shown_by": (
                    "with the block ended before backward, and nothing else changed, the first gradient is the same, "
                    "bit for bit"
                ),
            },
        },
        source="https://github.com/pytorch/pytorch/issues/153044",
    ),
}

found = finding_maker(CAUSES)
