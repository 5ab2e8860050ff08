"""The low-precision gradient equals the float64 gradient, up to the expected rounding error.

What it does
    It runs the loop up to the first optimizer step (longer for ``weights_cast_once``): unchanged, and with its knob
    ``precision`` at "bf16" and at "fp16". It compares the gradient with that of a float64 run with the same weights and
    random numbers.

    It predicts the rounding error. For that, it rounds the inputs and outputs of matrix products and convolutions in
    float64 to that dtype, or adds random errors of that size.

    A loop without low precision and without the knob runs under a bfloat16 autocast of the check. Findings there are
    advice.

Why is this bad?
    In float16, scores above 65504 are infinite, and gradients below 6e-8 become zero. bfloat16 keeps about three
    digits: a variance of large numbers is mostly rounding error, and long sums stop growing. The loop runs, but learns
    worse than in float32, or not at all.

How it decides
    1. The ratio is the measured error of the whole gradient over the predicted error (at least one rounding error). In
       our measurements right loops reach 1.77 and wrong ones begin at 10
       (docs/how-it-decides.md#expected-rounding-error).
    2. A ratio up to 2 passes. From 4 on it is a fault. Between them it is advice, with one exception. It is a fault if
       one operation is wrong by ten times its predicted error and, in float32, leaves at most half of the whole error.
    3. A gradient that is not finite is a fault if float64's is finite. If the loop has a GradScaler, the run begins at
       a loss scale that fits.
    4. If rounding changes a discrete choice (top-k, a comparison), a float64 run with the choices of the low-precision
       run counts too.
    5. It names the first operation whose output error is ten times too large. In backward, it names the first one that
       turns a right gradient wrong.
    6. A single parameter's gradient is judged if it is off by ten roundings, and by ten times the largest of seven
       rounded runs. It is a fault if running one module in float32 corrects that gradient.
    7. Under the check's own autocast only the whole gradient and angles are judged. A ratio up to 4 is no finding: the
       check does not apply. What is found is advice, also a gradient that is not finite.

    | what the numbers show | cause | advice if |
    |---|---|---|
    | in float16 a larger loss scale brings the gradient back | ``underflow`` | ratio below 4 |
    | not finite in low precision, finite in float64 | ``overflow`` | see item 7 |
    | zeros that float64 does not have | ``underflow`` | see item 2 |
    | a subtraction whose result is below a quarter of its operands | ``cancellation`` | see item 2 |
    | a sum, or more than 16 additions on one line | ``accumulation`` | see item 2 |
    | a custom ``autograd.Function`` turns a right gradient wrong | ``custom_backward`` | see item 2 |
    | none of these | ``precision_lost`` | see item 2 |
    | angles that depend on no weight differ by half a radian or more | ``angles_lost`` | see item 7 |
    | losses change once autocast's cached casts are cleared after each update | ``weights_cast_once`` |  |
    | backward runs inside the autocast block | ``backward_under_autocast`` | the gradient is the same when the block
      ends before it |

When it is skipped
    - The check does not apply to a loop that has no knob and computes nothing in low precision, if its gradient under
      an autocast is right.
    - A precision is left out if the loop raises in it, computes nothing in it, or makes other steps in it than in
      float64.
    - The loop raises in float64, does not run wholly in float64, or draws other random numbers there.
    - Float64's gradient is not finite either, or two runs under one seed differ.

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
    It judges the weights and batches of the first step only, so it does not see what overflows later. If your code
    assigns gradients, it compares those that the first step reads.

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
