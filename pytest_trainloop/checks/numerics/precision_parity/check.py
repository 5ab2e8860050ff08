"""In low precision the loop has the gradient that it has in float64, up to what rounding explains.

What it does
    It runs the loop to its first optimizer step as it is, and with its knob ``precision`` at "bf16" and at "fp16", and
    compares the gradient with that of a float64 run from the same weights and draws. How much error to expect is
    predicted: float64 runs in which inputs and outputs of matrix products and convolutions are rounded to the dtype's
    digits, or disturbed by as much. A loop that has no low precision is run under a bfloat16 autocast: what is found
    there is advice.

Why is this bad?
    Scores above 65504 are infinite in float16, gradients below 6e-8 are zero, and bfloat16 has three digits: the
    variance of large numbers is noise, and a sum over many steps stands still. The loop runs, and learns worse than it
    did in float32, or nothing.

How it decides
    The ratio of the measured to the predicted error of the whole gradient (never less than one rounding of it) is about
    1 on right loops, whether GPTs, convolutions with batch norm, contrastive losses or recurrent nets: up to 2 passes,
    from 4 it is a fault. Between them it is one if a single operation has more than ten times its explained error and,
    with it in float32, at most half of the gradient's error is left; else advice. A gradient that is not finite, where
    float64's is, is a fault. A scaler first finds its scale. Where scores that lie close together change places (top-k,
    comparisons), the float64 run is given the choices of the low one.
    The largest ratios over 20 seeds (python scripts/parity.py 20 --page; u: one rounding):
        loop                                                 bf16       fp16
        right: GPT                                           1.23      1.263
        right: GPT, trained                                 1.432      1.522
        right: convolutions, batch norm                     1.032      1.324
        right: convolutions, batch norm, trained            1.049       1.28
        right: LSTM                                        <= 2 u          -
        right: LSTM, trained                                1.768          -
        right: ViT                                          1.362     <= 2 u
        right: ViT, trained                                  1.77      1.629
        right: LoRA, base in bf16                          <= 2 u     <= 2 u
        right: LoRA, base in bf16, trained                 <= 2 u      1.203
        right: contrastive                                  1.604      1.536
        right: contrastive, trained                         1.593      1.602
        right: experts, top-2                              <= 2 u          1
        right: experts, top-2, trained                     <= 2 u     <= 2 u
        right: scan in float32                             <= 2 u      1.043
        right: scan in float32, trained                     1.463      1.612
        right: vector quantisation                         <= 2 u     <= 2 u
        right: vector quantisation, trained                <= 2 u      1.003
        wrong: attention scores overflow in float16        0.9971        inf
        wrong: float16 without a scaler                    <= 2 u      546.6
        wrong: norm by hand in bfloat16                     126.6     <= 2 u
        wrong: variance cancels in bfloat16             1.018e+04          -
        wrong: long sum in bfloat16                         51.09     <= 2 u
        wrong: own backward overflows in float16            10.28      82.06
        wrong: time steps in bfloat16                       36.39     <= 2 u

    Then every operation is compared in the same way: the first one whose output (in backward: whose gradient) has an
    error above ten times what rounding explains is the culprit; the cause is what the numbers there show.
    A small layer counts little in the whole gradient. A tensor that is off by ten roundings and by ten times what
    seven runs with rounding explain of it (and these leave it meaningful) is at fault where an operation is wrong, and
    the tensor right again once the operation's module is computed in float32.
    Products of positions and frequencies are rounded as any product is, and yet the angle is lost where the error is
    half a radian or more: two positions that are one radian apart may then coincide. The arguments of sin and cos that
    have no history are compared with float64's; right loops round sin and cos, not the angles.
    A backward pass called inside the autocast block is a fault where, with the block ended before it, the first
    gradient is another one: products that forward made in float32 are made in low precision in backward. Where it is
    the same, bit for bit, it is advice.
    Autocast casts a weight once and keeps the cast until its outermost block is left. Where weights are updated inside
    a block, the run is repeated with these casts dropped whenever the weights have changed: equal, bit for bit, unless
    a cast from before an update was read, which is a fault.

Faulty
    >>> def forward(self, x):
    ...     with torch.autocast("cpu", dtype=torch.float16):
    ...         h = 300 * self.encoder(x)
    ...         h = h / h.square().sum(-1, keepdim=True).sqrt()       # squares above 65504
    ...         return self.head(h).float()

Fixed
    >>> def forward(self, x):
    ...     with torch.autocast("cpu", dtype=torch.float16):
    ...         h = 300 * self.encoder(x)
    ...         h = F.normalize(h.float(), dim=-1)
    ...         return self.head(h).float()

Known limits
    Only the first step's weights and batches are judged: what overflows later is not seen. Loops whose code assigns
    gradients are compared by those that their first step reads.

References
    https://arxiv.org/abs/1710.03740 (Micikevicius et al., Mixed Precision Training)
    https://docs.pytorch.org/docs/stable/amp.html
    Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 1.7 (cancellation), 2.2, 4.2 (summation)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide, DoesNotApply
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.numerics.precision_parity.angles import LostAngles
    from pytest_trainloop.checks.numerics.precision_parity.backward_inside import Again
    from pytest_trainloop.checks.numerics.precision_parity.locate import Located
    from pytest_trainloop.checks.numerics.precision_parity.runs import Contexts, LowPrecisionRuns, Parity
    from pytest_trainloop.checks.numerics.precision_parity.single_tensors import LostTensor
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

_EXPLAINS = ("finite", "grad_scaler:scale_collapsed", "overfit_one_batch", "update_ratio", "loss_at_init")

_IN_FLOAT32 = "compute this block in float32: x = x.float(), under autocast(enabled=False)"

CAUSES = {
    "overflow": Cause(
        proof="an operation is not finite in low precision, and finite in float64",
        repair="scale before the product, keep this block in float32 (autocast(enabled=False), .float()), or use "
        "bfloat16",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "underflow": Cause(
        proof="values that are not zero in float64 are zero in low precision",
        repair="compute this block in float32, with an eps that the dtype holds, or use bfloat16",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "cancellation": Cause(
        proof="a difference of numbers that agree in most of their digits is wrong, and they are not",
        repair=_IN_FLOAT32,
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "accumulation": Cause(
        proof="a sum is wrong, and its terms are not",
        repair="add up in float32: keep the running sum a float32 tensor",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "custom_backward": Cause(
        proof="the gradient comes into an autograd.Function of the project right, and leaves it wrong",
        repair="save and compute in float32 in the Function, forward and backward; torch.amp.custom_fwd with "
        "cast_inputs=torch.float32 does it where the Function casts nothing itself",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "precision_lost": Cause(
        proof="the gradient is farther from float64 than rounding explains",
        repair=_IN_FLOAT32,
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "angles_lost": Cause(
        proof="angles of positions or timesteps, which come from no weight, are half a radian or more from float64",
        repair="where positions meet frequencies, compute in float32: with torch.autocast(device, "
        "enabled=False): angles = positions.float() * frequencies.float(); round sin and cos, not the angles",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "weights_cast_once": Cause(
        proof="with the casts that autocast keeps dropped after each update of the weights, the losses differ",
        repair="enter torch.autocast(...) anew for each forward pass, around model and loss, and leave it before "
        "backward() and step(); cache_enabled=False where one block must span several steps",
        explains=(*_EXPLAINS, "every_param_moves:not_updated", "precision_parity:backward_under_autocast"),
        change=("seen",),
    ),
    "backward_under_autocast": Cause(
        proof="backward is called inside the autocast block",
        repair="end the autocast block after the loss: backward runs in the dtypes that forward chose",
        explains=_EXPLAINS,
        change=("seen",),
    ),
}


@check(needs={"fit"}, causes=CAUSES, rank=30)
def precision_parity(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.precision_parity.angles import lost_angles
    from pytest_trainloop.checks.numerics.precision_parity.locate import locate
    from pytest_trainloop.checks.numerics.precision_parity.runs import FAILS, PASSES, low_precision_runs
    from pytest_trainloop.checks.numerics.precision_parity.single_tensors import lost_tensor
    from pytest_trainloop.checks.numerics.precision_parity.tensor_errors import TensorErrors

    nothing_low = False
    judged, imposed, undecided, absent = 0, False, list[CannotDecide](), list[CannotDecide]()
    made: list[tuple[Record, Again]] = [
        (evidence.run(), lambda contexts, rounds=1: _to_step(evidence, contexts, rounds))
    ]
    for runs in low_precision_runs(evidence):
        if isinstance(runs, CannotDecide):
            absent.append(runs)
            continue
        if not runs.imposed:
            made.append((runs.record, runs.again))
        try:
            parity = runs.parity()
        except CannotDecide as reason:
            undecided.append(reason)
            continue
        judged, imposed = judged + 1, runs.imposed
        if parity is not None and parity.ratio > (FAILS if runs.imposed else PASSES):
            evidence.shared(TensorErrors).runs = runs
            found = locate(runs, parity)
            sure = parity.ratio >= FAILS or found.left <= parity.measured / 2
            yield _finding(evidence, runs, parity, found, fault=sure and not runs.imposed)
            break
        if runs.angles and (lost := lost_angles(runs)) is not None:
            yield _lost_angles(runs, lost)
            break
        if not runs.imposed and (small := lost_tensor(runs)) is not None:
            evidence.shared(TensorErrors).runs = runs
            yield _lost_tensor(evidence, runs, small)
            break
    else:
        nothing_low = imposed
    inside = list(_weights_cast_once(made)) or list(_backward_under_autocast(made))
    yield from inside
    if not judged and not inside and (undecided or absent):
        raise (undecided or absent)[0]
    if nothing_low and not inside:
        raise DoesNotApply(
            "the loop computes nothing in low precision and has no knob precision=; under an autocast of this check "
            "its gradient agrees with float64"
        )


def _finding(evidence: Evidence, runs: LowPrecisionRuns, parity: Parity, found: Located, *, fault: bool) -> Finding:
    from pytest_trainloop.checks.numerics.precision_parity.replay import LOW
    from pytest_trainloop.recording.events import Backward
    from pytest_trainloop.tracing.made_at import MadeAt

    operation, record = found.operation, runs.record
    dtype = found.low.dtype if found.low is not None and found.low.dtype in LOW else parity.dtype
    name = str(dtype).removeprefix("torch.")
    place, culprits, repair, scaler = "", found.names, "", ""
    if operation is not None:
        place, culprits = str(operation.place), tuple(c for c in (operation.module, operation.name) if c)
    else:  # the first pass that gave a gradient, also one that accumulates nowhere
        place = str((record.backwards() or list(record.of(Backward)))[0].place)
        scaler, repair = _loss_scale(runs)
    if not fault:
        repair = f"{repair or CAUSES[found.kind].repair}; {_settled_by(runs)}"
    return Finding(
        cause=found.kind,
        level="fault" if fault else "advice",
        summary=_summary(found, name) + (f" ({runs.name})" if runs.name != "as it is" else ""),
        measured=_measured(parity, found, name, record) + (f"; {scaler}" if scaler else ""),
        shown_by=found.shown_by or "the first operation that is farther from float64 than its inputs explain",
        culprits=culprits,
        where=place,
        change=evidence.shared(MadeAt.of).scaler() if scaler else "",
        repair=repair,
    )


def _lost_tensor(evidence: Evidence, runs: LowPrecisionRuns, lost: LostTensor) -> Finding:
    finding = _finding(evidence, runs, lost.parity, lost.found, fault=True)
    return replace(
        finding,
        summary=f"{finding.summary}: the gradient of {lost.name} is lost",
        measured=finding.measured.replace("of the gradient", f"of the gradient of {lost.name}", 1)
        + f"; it is {lost.share:.1g} of the whole gradient's length, which hides it",
        culprits=(*finding.culprits, lost.name),
    )


def _lost_angles(runs: LowPrecisionRuns, lost: LostAngles) -> Finding:
    name = str(runs.low).removeprefix("torch.")
    at, angles = f" in {lost.angles.module}" if lost.angles.module else "", lost.angles
    return Finding(
        cause="angles_lost",
        level="advice" if runs.imposed else "fault",
        summary=f"{angles.name.rstrip('_')}{at} is given angles that {name} moves by half a radian or more"
        + (f" ({runs.name})" if runs.name != "as it is" else ""),
        measured=f"{share(lost.share)} of the angles are off by half a radian or more; the worst, {lost.at:.6g}, is "
        f"off by {lost.largest:.2g} rad",
        shown_by="the same angles in a float64 run from the same start; they come from no weight",
        culprits=tuple(c for c in (angles.module, angles.name) if c),
        where=str(angles.place),
    )


def _loss_scale(runs: LowPrecisionRuns) -> tuple[str, str]:
    """How a scaler of the loop leaves the loss as it is, "" where it does not; and the repair."""
    calls = runs.record.scaler_calls()
    if not calls:
        return "", "scale the loss (torch.amp.GradScaler), or use bfloat16"
    if not any(call.enabled for call in calls):
        return (
            "the loop's GradScaler is disabled: the loss is scaled by 1",
            "GradScaler(..., enabled=True) where autocast is in float16; or use bfloat16 (torch disables a scaler for "
            "a device that the machine lacks: give it that of the model)",
        )
    if not runs.rescaled and all(call.factor == 1.0 for call in calls if call.what == "scale" and call.enabled):
        return "the loop's GradScaler has the scale 1", "GradScaler(..., init_scale=2.0**16), its default; or bfloat16"
    return (
        "",
        "use bfloat16, or compute in float32 where values are small or large (autocast(enabled=False), .float())",
    )


def _settled_by(runs: LowPrecisionRuns) -> str:
    if runs.imposed:
        return (
            "where the loop is to run in low precision, a knob precision= that its autocast follows makes this a fault"
        )
    return "the block in float32 settles it: up to twice what rounding explains passes"


def _summary(found: Located, name: str) -> str:
    operation = found.operation
    what = "the gradient"
    if operation is not None:
        what = f"{operation.name} in {operation.module}" if operation.module else operation.name
    zeros = "small values become zero" if operation else f"{found.share:.0%} of its entries are zero"
    return {
        "overflow": f"{what} overflows in {name}" + (" in backward" if found.direction == "backward" else ""),
        "underflow": f"{what} underflows in {name}: {zeros}",
        "cancellation": f"{what} takes the difference of numbers that {name} rounds to nearly the same",
        "accumulation": f"{what} adds up in {name}: each term is rounded away next to the sum",
        "custom_backward": f"the backward of {what} gives another gradient in {name}",
        "precision_lost": f"{what} loses more in {name} than rounding explains",
    }[found.kind]


def _measured(parity: Parity, found: Located, name: str, record: Record) -> str:
    import torch

    texts = [f"the gradient is inf or NaN in {name}, and finite in float64"]
    if parity.finite:
        texts = [
            f"relative error of the gradient {parity.measured:.2g}, rounding explains {parity.explained:.2g}: "
            f"{parity.ratio:.3g} times as much"
        ]
    if found.low is not None and found.reference is not None:
        info, vanished = torch.finfo(getattr(torch, name)), found.low.zeros - found.reference.zeros
        shares = f", {found.low.lost:.0%} of it not finite" if found.low.lost else ""
        if not shares and vanished > 0.005:
            shares = f", {vanished:.0%} of it zero only in {name}"
        texts.append(f"largest value there {found.reference.peak:.4g} in float64{shares}")
        texts.append(f"{name} holds {info.smallest_normal * info.eps:.2g} to {info.max:.6g}")
    if any(p.device.startswith("cuda") for p in record.parameters):
        plain = torch.get_float32_matmul_precision() == "highest"
        texts.append(f"float32 products in {'float32' if plain else 'TF32'}")
    return "; ".join(texts)


def _to_step(evidence: Evidence, contexts: Contexts, rounds: int) -> Record:
    outer = evidence.plan().contexts
    return evidence.rerun(enough=lambda r: r.rounds >= rounds, contexts=lambda watch: (*outer(watch), *contexts(watch)))


def _weights_cast_once(made: Sequence[tuple[Record, Again]]) -> Iterator[Finding]:
    """Of the first run whose weights are updated inside an autocast block that goes on."""
    from pytest_trainloop.checks.numerics.precision_parity.stale_casts import may_be_stale, stale_casts

    for record, again in made:
        found = stale_casts(again) if may_be_stale(record) else None
        if found is None:
            continue
        inside = [step for step in record.innermost_steps() if step.blocks]
        yield Finding(
            cause="weights_cast_once",
            summary=f"backward pass {found.number} computes with weights from before an update: autocast casts each "
            "weight once, and keeps the cast until its outermost block is left",
            measured=f"loss {found.stale:.6g}, and {found.fresh:.6g} with the weights as they are by then"
            + (f"; the block is entered at {found.entered}" if found.entered else "")
            + (f"; {len(inside)} steps are made inside of a block" if inside else ""),
            shown_by="with the casts dropped whenever the weights have changed, and nothing else, the loss differs",
            culprits=("autocast",),
            where=str(inside[0].place) if inside else record.step_line(),
            change=found.entered,
        )
        return


def _backward_under_autocast(made: Sequence[tuple[Record, Again]]) -> Iterator[Finding]:
    """Of the first run in which a backward pass is called inside an autocast block."""
    from pytest_trainloop.checks.numerics.precision_parity.backward_inside import change_of_gradient

    for record, again in made:
        inside = [b for b in record.backwards() if b.autocast]
        if not inside:
            continue
        change = change_of_gradient(again, inside[0].autocast)
        yield Finding(
            cause="backward_under_autocast",
            level="fault" if change else "advice",
            summary="backward() runs inside the autocast block, which "
            + (f"changes the gradient by {change:.1g} of its size" if change else "torch advises against"),
            measured=f"{len(inside)} of {len(record.backwards())} backward passes under {inside[0].autocast}"
            + (f"; relative difference of the first gradient {change:.1g}" if change else ""),
            shown_by="with the block ended before backward, and nothing else changed, the first gradient is "
            + ("another one" if change else "the same, bit for bit"),
            culprits=("autocast",),
            where=str(inside[0].place),
        )
        return
