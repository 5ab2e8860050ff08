"""The arithmetic of torch's own optimizers holds: eps, betas, and the variants of their step.

What it does
    It copies a few entries of parameters, gradients and state at the first steps, and repeats these steps on the
    copies: by every variant (for-loop, foreach, fused), in the dtype of the parameters and in float64, and on gradients
    of zero.

Why is this bad?
    Adam divides by sqrt(v) + eps. In float16 eps = 1e-8 is 0, and so is v for gradients below 5e-3: the step is
    infinite. With the two betas swapped v decays faster than m, and steps grow where gradients vanish.

How it decides
    eps: a fault where a step leaves an entry non-finite, its second moment is 0, eps is 0 in the dtype of that, and
    parameter and gradient were finite before. An eps that is 0 in its dtype and did no harm so far is advice. A fused
    or capturable step adds eps in another way and is not judged.
    Betas: without a gradient a step scales as (b1 / sqrt(b2))^k, so that b1 must be below sqrt(b2) (Reddi et al.).
    Where it is not, copies are stepped without gradients 300 times. A fault needs one of these steps to be 10 times the
    last one with a gradient, and b1^2 / sqrt(b2) >= 1, against Adam's own theorem; a step that grows less is advice.
    With amsgrad nothing is reported.
    The step count: in bfloat16 it stops at 256, in float16 at 2048.
    Variants: in float64 from the same values, the for-loop step is the reference. A step rounds at most some thirty
    times; a variant with an error above 32 eps of parameter and update is named. It is a fault where the loop uses the
    fused step, its error is half the update or more, and the for-loop is right in the same dtype; else advice.

Faulty
    >>> model = Classifier()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.999, 0.9))

Fixed
    >>> model = Classifier()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.999))

Known limits
    Adadelta, Rprop, Adafactor, Muon, LBFGS and SparseAdam, optimizers of a project's own, and those with step hooks of
    their own are not judged; nor are sparse gradients, and steps in which a gradient scaler takes part. Of a tensor the
    first 4096 entries are copied.

References
    https://arxiv.org/abs/1412.6980 (Kingma & Ba, Adam, theorem 4.1)
    https://arxiv.org/abs/1904.09237 (Reddi et al., On the Convergence of Adam and Beyond)
    https://docs.pytorch.org/docs/stable/optim.html (foreach and fused implementations)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.numerics.optimizer_numerics.betas import GrowingSteps
    from pytest_trainloop.checks.numerics.optimizer_numerics.first_steps import FirstSteps, LowPrecisionCount
    from pytest_trainloop.checks.numerics.optimizer_numerics.step_variants import WrongVariant
    from pytest_trainloop.checks.numerics.optimizer_numerics.zero_denominators import DividedByZero
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

_EXPLAINS = ("finite", "overfit_one_batch", "update_ratio", "precision_parity", "every_param_moves")

CAUSES = {
    "eps_underflows": Cause(
        proof="eps is 0 in the dtype of the state, and a step divides by a second moment that is 0",
        repair="keep weights and optimizer state in float32 and compute under autocast; or eps=1e-4, or fused=True",
        explains=_EXPLAINS,
        change=(
            "cast",
            "optimizer",
        ),
    ),
    "eps_missing": Cause(
        proof="eps is 0, and a step divides by a second moment that is 0",
        repair="give eps a value above 0 (Adam's default is 1e-8)",
        explains=_EXPLAINS,
        change=("optimizer",),
    ),
    "step_count_saturates": Cause(
        proof="1 added to the step count gives the same count, in the dtype that it is kept in",
        repair="keep state['step'] in float32, as torch creates it, where the state is written, loaded or cast",
        explains=("update_ratio",),
        change=("cast",),
    ),
    "betas_swapped": Cause(
        proof="copies stepped without gradients make ever larger steps",
        explains=("finite", "overfit_one_batch", "update_ratio"),
        change=("optimizer",),
    ),
    "variants_differ": Cause(
        proof="the same steps on copies in float64 give another result",
        repair="keep weights and optimizer state in float32 and compute under autocast",
        explains=_EXPLAINS,
        change=(
            "cast",
            "optimizer",
        ),
    ),
}

GROWN = 10.0
"""Size of a step without a gradient, relative to the last one with, from which growth counts as unbounded."""


@check(
    needs={"fit"},
    causes=CAUSES,
    rank=50,
    steps=5,
    instrument="pytest_trainloop.checks.numerics.optimizer_numerics.first_steps:FirstSteps",
)
def optimizer_numerics(evidence: Evidence) -> Iterator[Finding]:
    record = evidence.run()
    if not record.steps:
        raise CannotDecide("no optimizer step was seen")
    from pytest_trainloop.checks.numerics.optimizer_numerics.betas import growing_steps
    from pytest_trainloop.checks.numerics.optimizer_numerics.first_steps import FirstSteps

    first = evidence.shared(FirstSteps.of)
    undecided = None
    try:
        eps = list(_eps(evidence, record, first))
    except CannotDecide as reason:  # a single run does not show what was divided by zero
        eps, undecided = [], reason
    yield from eps
    yield from (_step_count(record, count) for count in first.low_precision_counts())
    for start in first.found.values():
        for group in growing_steps(start.snap):
            if group.by > 1.0:
                yield _betas(record, group, first.record.names(group.indices))
    if undecided is not None:
        raise undecided
    if not eps:
        yield from _variants(record, first)


def _eps(evidence: Evidence, record: Record, first: FirstSteps) -> Iterator[Finding]:
    """Each eps that is 0: the steps that divide by it, or advice where none did."""
    zero = first.zero_eps()
    if not zero:
        return
    from pytest_trainloop.checks.numerics.optimizer_numerics.zero_denominators import ZeroDenominators

    divided = evidence.shared(ZeroDenominators).found
    for missing in (False, True):
        found = [d for d in divided if (d.eps == 0.0) is missing]
        if found:
            yield _divided(record, found)
    for eps in zero if not divided else ():
        if eps.given:
            yield Finding(
                cause="eps_underflows",
                level="advice",
                summary=f"eps = {eps.given:g} of {eps.kind} is 0 in {eps.dtype}, the dtype of its second moment",
                measured=f"{len(eps.names)} tensors; the smallest number above 0 in {eps.dtype} is 6e-08; none was "
                "divided by 0",
                shown_by="the conversion of eps to that dtype",
                culprits=eps.names,
                where=record.step_line(),
            )


def _divided(record: Record, found: Sequence[DividedByZero]) -> Finding:
    first = min(found, key=lambda d: d.step)
    names = tuple(d.name for d in found)
    missing = first.eps == 0.0
    why = (
        "eps = 0, and the second moment is 0"
        if missing
        else f"eps = {first.eps:g} is 0 in {first.dtype}, the dtype of its second moment"
    )
    without = f", {first.without} of them with a gradient of exactly 0 (0/0)" if first.without else ""
    return Finding(
        cause="eps_missing" if missing else "eps_underflows",
        summary=f"{first.kind} divides by zero at {some(names)}: {why}",
        measured=(
            f"step {first.step}: {first.count} of {first.entries} entries of {first.name} are not finite after it"
            f"{without}; their second moment is 0 in {first.dtype}"
            + (f"; the loop keeps {first.state} in {first.dtype}, and the weights are {first.weights}" * first.narrowed)
        ),
        shown_by="parameter and gradient were finite before the step, and the second moment of these entries is 0",
        culprits=names,
        where=record.step_line(),
        change=first.cast,
        repair=f"keep {first.state} in {first.weights} (or bfloat16): leave out the cast of the state; or eps=1e-4"
        if first.narrowed
        else "",
    )


def _step_count(record: Record, count: LowPrecisionCount) -> Finding:
    return Finding(
        cause="step_count_saturates",
        summary=f"{count.kind} counts the steps of {some(count.names)} in {count.dtype}, where {count.last} + 1 is "
        f"{count.last}",
        measured=f"state['step'] is a {count.dtype} tensor for {len(count.names)} parameters; bias corrections stop at "
        f"step {count.last}",
        shown_by=f"the next number after {count.last} in {count.dtype} is {count.last + 2}",
        culprits=count.names,
        where=record.step_line(),
    )


def _betas(record: Record, found: GrowingSteps, names: tuple[str, ...]) -> Finding:
    return Finding(
        cause="betas_swapped",
        level="fault" if found.breaks_theorem and found.by >= GROWN else "advice",
        summary=f"betas = ({found.first:g}, {found.second:g}) of {found.kind}: steps grow where gradients vanish",
        measured=(
            f"b1 / sqrt(b2) = {found.ratio:.3f}, above 1; on copies without gradients the largest step is "
            f"{found.by:.3g} times the first, after {found.after} steps"
        ),
        shown_by="with no gradient the second moment decays faster than the first",
        culprits=names,
        where=record.step_line(),
        repair=f"betas=({min(found.first, found.second):g}, {max(found.first, found.second):g})",
    )


def _variants(record: Record, first: FirstSteps) -> Iterator[Finding]:
    """By optimizer and dtype."""
    from pytest_trainloop.checks.numerics.optimizer_numerics.step_variants import wrong_variants

    for start in first.found.values():
        found = list(wrong_variants(start.snap))
        for dtype in dict.fromkeys(f.dtype for f in found):
            yield _wrong(record, [f for f in found if f.dtype == dtype], first.record)


def _wrong(record: Record, found: Sequence[WrongVariant], names: Record) -> Finding:
    """The variants that are wrong in one dtype: the one that the loop uses before all others."""
    first = max(found, key=lambda f: (f.in_use, f.error / f.update if f.update else 0.0))
    fault = first.in_use and first.variant == "fused" and "for-loop" in first.right and first.error >= first.update / 2
    every = " and ".join(f.variant for f in sorted(found, key=lambda f: not f.in_use))
    used = "" if first.in_use else ", which this loop does not use,"
    right = f"; {' and '.join(first.right)} {be(first.right)} right" if first.right else ""
    size = "not finite" if math.isinf(first.error) else f"off by {first.error:.1e}"
    peaks = ", ".join(f"{variant} {size / 2**20:.1f} MiB" for variant, size in first.peaks.items())
    repair = ""
    if first.right:
        flag = "foreach=False, fused=False" if first.right[0] == "for-loop" else f"{first.right[0]}=True"
        repair = f"use the {first.right[0]} step ({flag})" if first.in_use else f"stay with {first.right[0]}"
    return Finding(
        cause="variants_differ",
        level="fault" if fault else "advice",
        summary=f"the {every} step of {first.kind}{used} gives a wrong {names.name(first.index)} in {first.dtype}",
        measured=(
            f"{first.variant}: {size} after two steps, where the largest update is {first.update:.1e} and rounding "
            f"allows {first.allowed:.1e}{right}{f'; peak memory: {peaks}' if peaks else ''}"
        ),
        shown_by="the same two steps on copies in float64, by the for-loop",
        culprits=tuple(dict.fromkeys(names.name(f.index) for f in found)),
        where=record.step_line(),
        repair=repair,
    )
