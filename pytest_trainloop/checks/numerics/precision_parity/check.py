"""In low precision the loop has the gradient that it has in float64, up to what rounding explains.

What it does
    It runs the loop to its first optimizer step as it is, and with its knob ``precision`` at "bf16" and at "fp16". It
    compares the gradient with that of a float64 run from the same weights and draws.

    How much error to expect is predicted. In float64 runs the inputs and outputs of matrix products and convolutions
    are rounded to the dtype's digits, or disturbed by as much.

    A loop that has no low precision is run under a bfloat16 autocast: what is found there is advice.

Why is this bad?
    Scores above 65504 are infinite in float16, gradients below 6e-8 are zero, and bfloat16 has three digits: the
    variance of large numbers is noise, and a sum over many steps stops growing. The loop runs, and learns worse than it
    did in float32, or nothing.

How it decides
    1. It divides the measured error of the whole gradient by the predicted one, which is never less than one rounding.
       Right loops reach 1.77 and wrong ones begin at 10 (docs/how-it-decides.md#expected-rounding-error).
    2. A ratio up to 2 passes, and from 4 it is a fault. Between them it is a fault if one operation in float32 leaves
       at most half of the error; else advice. Under the check's own autocast it is advice from 4 on.
    3. A gradient that is not finite is a fault if float64's is finite. A scaler first finds its scale. Where close
       scores change places (top-k, comparisons), float64 gets the choices of the low run.
    4. It then compares operations: the first whose output has ten times its explained error is named. In backward, it
       is the first that makes a wrong gradient of a right one.
    5. A single tensor is judged if it is off by ten roundings, and by ten times the error of seven rounded runs. It is
       a fault if an operation is wrong and its module in float32 makes the tensor right.
    6. It skips a loop that has no knob and computes nothing in low precision, if its gradient under an autocast is
       right. It skips precisions whose runs cannot be compared.

    | what the numbers show | cause | advice if |
    |---|---|---|
    | in float16 a larger loss scale brings the gradient back | ``underflow`` | ratio below 4 |
    | not finite in low precision, finite in float64 | ``overflow`` |  |
    | zeros that float64 does not have | ``underflow`` | as step 2 says |
    | a difference below a quarter of its operands | ``cancellation`` | as step 2 says |
    | a sum, or more than 16 additions on one line | ``accumulation`` | as step 2 says |
    | a custom ``autograd.Function`` makes a right gradient wrong | ``custom_backward`` | as step 2 says |
    | none of these | ``precision_lost`` | as step 2 says |
    | arguments of sin and cos without history are half a radian off | ``angles_lost`` | own autocast |
    | with casts dropped after each weight update, losses differ in any bit | ``weights_cast_once`` |  |
    | backward lies inside the autocast block | ``backward_under_autocast`` | equal if the block ends first |

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
