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

from typing import TYPE_CHECKING

from pytest_trainloop.checks.numerics.precision_parity.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.precision_parity.further import Again
    from pytest_trainloop.checks.numerics.precision_parity.runs import Contexts
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"fit"}, causes=CAUSES, rank=30)
def precision_parity(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.precision_parity import further, operations
    from pytest_trainloop.checks.numerics.precision_parity.runs import FAILS, PASSES, TensorErrors, low_precision_runs

    def again(contexts: Contexts, rounds: int = 1) -> Record:
        outer = evidence.plan().contexts
        return evidence.rerun(
            enough=lambda r: r.rounds >= rounds, contexts=lambda watch: (*outer(watch), *contexts(watch))
        )

    made: list[tuple[Record, Again]] = [(evidence.run(), again)]
    wrong: list[Finding] = []
    undecided: list[CannotDecide] = []
    absent: list[CannotDecide] = []
    judged = imposed = False
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
        judged, imposed = True, runs.imposed
        if parity is not None and parity.ratio > (FAILS if runs.imposed else PASSES):
            evidence.shared(TensorErrors).runs = runs
            wrong = [operations.whole_gradient(evidence, runs, parity)]
        elif not (wrong := list(further.lost_angles(runs))) and (wrong := list(operations.one_tensor(runs))):
            evidence.shared(TensorErrors).runs = runs
        if wrong:
            break
    yield from wrong
    inside = list(further.weights_cast_once(made)) or list(further.backward_under_autocast(made))
    yield from inside
    if not judged and not inside and (undecided or absent):
        raise (undecided or absent)[0]
    if imposed and not wrong and not inside:
        raise DoesNotApply(
            "the loop computes nothing in low precision and has no knob precision=; under an autocast of this check "
            "its gradient agrees with float64"
        )
