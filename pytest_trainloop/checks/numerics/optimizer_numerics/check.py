"""The arithmetic of optimizers holds: eps, betas, the count of steps, and the variants of torch's step.

What it does
    It copies a few entries of parameters, gradients and state at the first steps, and repeats these steps on the
    copies. It repeats them by every variant (for-loop, foreach, fused), in the dtype of the parameters and in float64,
    and on gradients of zero.

Why is this bad?
    Adam divides by sqrt(v) + eps. In float16 eps = 1e-8 is 0, and so is v for gradients below 5e-3: the step is
    infinite. With the two betas swapped v decays faster than m, and steps grow where gradients vanish.

How it decides
    1. It repeats the first steps on copies of a few entries. Optimizers with step hooks of their own are not judged.
    2. eps: a step leaves an entry non-finite, its second moment is 0, eps is 0 in its dtype, and parameter and gradient
       were finite. A fused or capturable step adds eps in another way and is not judged.
    3. Betas: without a gradient a step scales as (b1 / sqrt(b2))^k, so b1 must be below sqrt(b2) (Reddi and others).
       Otherwise copies are stepped without gradients 300 times. With amsgrad nothing is reported.
    4. Variants: the for-loop step in float64 is the reference. A step rounds some thirty times at most. A variant is
       named if its error is above 32 eps of parameter and update.
    5. Count of steps: an optimizer of the project's own with two betas, whose state holds Adam's two averages. Its
       first three steps are computed in float64. Another count is named if it gives all steps of all tensors, and the
       right one does not.
    6. Options: weight decay and momentum of an optimizer of the project's own. The run is made again with another
       value, which must change some bit of the weights.

    | seen | cause | advice if |
    |---|---|---|
    | item 2, with an eps that is not 0 in float64 | ``eps_underflows`` | no harm so far |
    | item 2, with eps = 0 | ``eps_missing`` |  |
    | the step count stops: at 256 in bfloat16, at 2048 in float16 | ``step_count_saturates`` |  |
    | an own Adam corrects as in step 1 always, or counts each tensor | ``steps_miscounted`` |  |
    | another decay or momentum changes nothing; in 16 bits, no decay | ``option_without_effect`` | it is the default |
    | a step is 10 times the last one with a gradient, and b1^2 / sqrt(b2) >= 1 | ``betas_swapped`` | it grows less |
    | the fused step is wrong by half the update, the for-loop right | ``variants_differ`` | other errors; not used |

When it is skipped
    It skips a loop without an optimizer step.

Faulty
    >>> model = Classifier()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.999, 0.9))

Fixed
    >>> model = Classifier()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.999))

Known limits
    Adadelta, Rprop, Adafactor, Muon, LBFGS and SparseAdam, and those with step hooks of their own are not judged. Of
    optimizers of a project's own only decay, momentum and the count of steps in an Adam are. Sparse gradients are not
    judged, nor steps in which a gradient scaler takes part. Of a tensor the first 4096 entries are copied.

References
    https://arxiv.org/abs/1412.6980 (Kingma & Ba, Adam, theorem 4.1)
    https://arxiv.org/abs/1904.09237 (Reddi et al., On the Convergence of Adam and Beyond)
    https://docs.pytorch.org/docs/stable/optim.html (foreach and fused implementations)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.numerics.optimizer_numerics.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(
    needs={"fit"},
    causes=CAUSES,
    rank=50,
    steps=5,
    instrument="pytest_trainloop.checks.numerics.optimizer_numerics.watched_steps:FirstSteps",
)
def optimizer_numerics(evidence: Evidence) -> Iterator[Finding]:
    record = evidence.run()
    if not record.steps:
        raise CannotDecide("no optimizer step was seen")
    from pytest_trainloop.checks.numerics.optimizer_numerics import (
        idle_options,
        own_adams,
        repeated_steps,
        watched_steps,
    )

    first, line, undecided = evidence.shared(watched_steps.FirstSteps.of), record.step_line(), None
    try:
        eps = list(watched_steps.zero_eps(evidence, first, line))
    except CannotDecide as reason:  # a single run does not show what was divided by zero
        eps, undecided = [], reason
    yield from eps
    yield from watched_steps.low_precision_counts(first, line)
    yield from repeated_steps.growing_steps(first, line)
    yield from own_adams.miscounted(first.own, first.record, line)
    yield from idle_options.without_effect(evidence)
    if undecided is not None:
        raise undecided
    if not eps:
        yield from repeated_steps.wrong_variants(first, line)
