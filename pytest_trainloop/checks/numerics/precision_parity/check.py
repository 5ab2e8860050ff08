"""In low precision the loop has the gradient that it has in float64, but for what rounding explains.

What it does
    It runs the loop to its first optimizer step as it is, and with its knob ``precision`` at "bf16" and at "fp16", and
    compares the gradient with that of a float64 run from the same weights and draws. How much error to expect is
    predicted: float64 runs in which what goes into matrix products and convolutions, and what comes out, is rounded to
    the dtype's digits, or disturbed by as much. A loop that has no low precision is run under a bfloat16 autocast: what
    is found there is advice.

Why is this bad?
    Scores above 65504 are infinite in float16, gradients below 6e-8 are zero, and bfloat16 has three digits: the
    variance of large numbers is noise, a sum over many steps stands still. The loop runs, and learns worse than it did
    in float32, or nothing.

How it decides
    The ratio of the measured to the predicted error of the whole gradient (never less than one rounding of it) is about
    1 on right loops, GPTs, convolutions with batch norm, contrastive losses and recurrent nets alike: up to 2 passes,
    from 4 it is a fault, between them it is advice. A gradient that is not finite, where float64's is, is a fault. A
    scaler first finds its scale. Where scores that lie close together change places (top-k, comparisons), the float64
    run is given the choices of the low one.
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

    Then every operation is compared in the same way: the first one whose output (in backward: whose gradient) is out by
    more than ten times what rounding explains is the culprit; the cause is what the numbers there show.

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
    The first step's weights and batches are looked at: what overflows only later is not seen. Loops whose gradients
    come by hand are compared by what their first step consumes.

References
    https://arxiv.org/abs/1710.03740 (Micikevicius et al., Mixed Precision Training)
    https://docs.pytorch.org/docs/stable/amp.html
    Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 1.7 (cancellation), 2.2, 4.2 (summation)
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.precision_parity.locate import Located
    from pytest_trainloop.checks.numerics.precision_parity.runs import Parity, Way
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("finite", "grad_scaler", "overfit_one_batch", "update_ratio", "loss_at_init")

CAUSES = {
    "overflow": "an operation is not finite in low precision, and finite in float64",
    "underflow": "values that are not zero in float64 are zero in low precision",
    "cancellation": "a difference of numbers that agree in most of their digits is out, and they are not",
    "accumulation": "a sum is out, and what is added up is not",
    "custom_backward": "the gradient comes into an autograd.Function of the project right, and leaves it wrong",
    "precision_lost": "the gradient is farther from float64 than rounding explains",
    "backward_under_autocast": "backward is called inside the autocast block",
}

REPAIRS = {
    "overflow": "scale before the product, keep this block in float32 (autocast(enabled=False), .float()), or use "
    "bfloat16",
    "underflow": "compute this block in float32, with an eps that the dtype holds, or use bfloat16",
    "cancellation": "compute this block in float32: x = x.float(), under autocast(enabled=False)",
    "accumulation": "add up in float32: keep the running sum a float32 tensor",
    "custom_backward": "save and compute in float32 in the Function, or put torch.amp.custom_fwd(cast_inputs="
    "torch.float32) and custom_bwd on it",
    "precision_lost": "compute this block in float32: x = x.float(), under autocast(enabled=False)",
}


@check(needs={"fit"}, causes=CAUSES, rank=30)
def precision_parity(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.precision_parity.locate import locate
    from pytest_trainloop.checks.numerics.precision_parity.runs import FAILS, PASSES, ways

    knob = evidence.knobs.get("precision")
    default = inspect.signature(evidence.make).parameters[knob].default if knob else None
    judged, undecided, idle = 0, list[str](), list[str]()
    for way in ways(evidence, knob, default, idle):
        try:
            parity = way.parity()
        except CannotDecide as reason:
            undecided.append(str(reason))
            continue
        judged += 1
        if parity is not None and parity.ratio > (FAILS if way.imposed else PASSES):
            fault = parity.ratio >= FAILS and not way.imposed
            yield _finding(way, parity, locate(way, parity), fault)
            break
    yield from _backward_under_autocast(evidence)
    if not judged and (undecided or idle):
        raise CannotDecide((undecided or idle)[0])


def _finding(way: Way, parity: Parity, found: Located, fault: bool) -> Finding:
    from pytest_trainloop.checks.numerics.precision_parity.runs import name_of, products_in_float32

    name, call = name_of(parity, found.low), found.call
    culprits = tuple(c for c in (call.module, call.name) if c) if call else found.names
    return Finding(
        cause=found.kind,
        level="fault" if fault else "advice",
        summary=_summary(found, name) + (f" ({way.name})" if way.name != "as it is" else ""),
        measured="; ".join(filter(None, (_measured(parity, found, name), products_in_float32(way.record)))),
        shown_by=found.shown_by or "the first operation that is farther from float64 than what it is given explains",
        culprits=culprits,
        where=str(call.place if call else _gradient_line(way.record)),
        repair=REPAIRS[found.kind] if call else _repair_of_all(way.record),
        explains=CONSEQUENCES if fault else (),
    )


def _repair_of_all(record: Record) -> str:
    if any(call.enabled for call in record.scaler_calls()):
        return "use bfloat16, or compute in float32 where values are small or large (autocast(enabled=False), .float())"
    return "scale the loss (torch.amp.GradScaler), or use bfloat16"


def _gradient_line(record: Record) -> Place:
    """The first pass that gave a gradient, also one that accumulates nowhere."""
    from pytest_trainloop.recording.events import Backward

    return (record.backwards() or list(record.of(Backward)))[0].place


def _summary(found: Located, name: str) -> str:
    call = found.call
    what = f"{call.name}" + (f" in {call.module}" if call.module else "") if call else "the gradient"
    if found.kind == "overflow":
        return f"{what} overflows in {name}" + (" on the way back" if found.direction == "backward" else "")
    if found.kind == "underflow":
        return f"{what} underflows in {name}: " + (
            f"{found.share:.0%} of its entries are zero" if call is None else "small values become zero"
        )
    if found.kind == "cancellation":
        return f"{what} takes the difference of numbers that {name} rounds to nearly the same"
    if found.kind == "accumulation":
        return f"{what} adds up in {name}: what is added is lost beside the sum"
    if found.kind == "custom_backward":
        return f"the backward of {what} gives another gradient in {name}"
    return f"{what} loses more in {name} than rounding explains"


def _measured(parity: Parity, found: Located, name: str) -> str:
    from pytest_trainloop.checks.numerics.precision_parity.runs import limits

    text = (
        f"relative error of the gradient {parity.measured:.2g}, rounding explains {parity.explained:.2g}: "
        f"{parity.ratio:.3g} times as much"
        if parity.finite
        else f"the gradient is inf or NaN in {name}, and finite in float64"
    )
    if found.low is None or found.reference is None:
        return text
    largest, smallest = limits(name)
    vanished = found.low.zeros - found.reference.zeros
    shares = (f"{found.low.lost:.0%} of it not finite" if found.low.lost else "") or (
        f"{vanished:.0%} of it zero only in {name}" if vanished > 0.005 else ""
    )
    return (
        f"{text}; largest value there {found.reference.peak:.4g} in float64, "
        + (f"{shares}; " if shares else "")
        + f"{name} holds {smallest:.2g} to {largest:.6g}"
    )


def _backward_under_autocast(evidence: Evidence) -> Iterator[Finding]:
    inside = [b for b in evidence.run().backwards() if b.autocast]
    if inside:
        yield Finding(
            cause="backward_under_autocast",
            level="advice",
            summary="backward() runs inside the autocast block: torch advises against it",
            measured=f"{len(inside)} of {len(evidence.run().backwards())} backward passes under {inside[0].autocast}",
            shown_by="autocast is on when backward is called",
            culprits=("autocast",),
            where=str(inside[0].place),
            repair="end the autocast block after the loss: backward runs in the dtypes that forward chose",
        )
