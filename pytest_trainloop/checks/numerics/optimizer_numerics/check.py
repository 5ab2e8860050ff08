"""The arithmetic of torch's own optimizers holds: eps, betas, and the variants of their step.

What it does
    It copies a few entries of parameters, gradients and state at the first steps, and makes these steps again on the
    copies: by every variant (for-loop, foreach, fused), in the dtype of the parameters and in float64, and on gradients
    of zero.

Why is this bad?
    Adam divides by sqrt(v) + eps. In float16 eps = 1e-8 is 0, and so is v for gradients below 5e-3: the step is
    infinite. With betas the wrong way round v is forgotten before m, and steps grow by themselves where gradients
    vanish.

How it decides
    eps: a fault where a step leaves an entry that is not finite, its second moment is 0, eps is 0 in the dtype of that,
    and parameter and gradient were finite before. An eps that is 0 in its dtype and was not seen to hurt is advice. A
    fused or capturable step adds eps otherwise and is left alone.
    Betas: without a gradient a step goes as (b1 / sqrt(b2))^k, so that b1 must be below sqrt(b2) (Reddi et al.). Where
    it is not, copies are stepped without gradients 300 times. A fault needs one of these steps to be 10 times the last
    one with a gradient, and b1^2 / sqrt(b2) >= 1, against Adam's own theorem; a step that grows less is advice. With
    amsgrad nothing is said.
    The count of steps: in bfloat16 it stops at 256, in float16 at 2048.
    Variants: in float64 from the same values, the for-loop step is the reference. A step rounds at most some thirty
    times; a variant that is off by more than 32 eps of parameter and update is named. It is a fault where the loop uses
    the fused step, that is off by half the update or more, and the for-loop is right in the same dtype; else advice.

Faulty
    >>> model = Classifier()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.999, 0.9))

Fixed
    >>> model = Classifier()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.999))

Known limits
    Adadelta, Rprop, Adafactor, Muon, LBFGS and SparseAdam, optimizers of a project's own, and those with step hooks of
    their own are not looked at; nor are sparse gradients, and steps into which a gradient scaler reaches. Of a tensor
    the first 4096 entries are copied.

References
    https://arxiv.org/abs/1412.6980 (Kingma & Ba, Adam, theorem 4.1)
    https://arxiv.org/abs/1904.09237 (Reddi et al., On the Convergence of Adam and Beyond)
    https://docs.pytorch.org/docs/stable/optim.html (foreach and fused implementations)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.numerics.optimizer_numerics.betas import Growing
    from pytest_trainloop.checks.numerics.optimizer_numerics.first_steps import Epsilon, FirstSteps
    from pytest_trainloop.checks.numerics.optimizer_numerics.step_variants import Apart
    from pytest_trainloop.checks.numerics.optimizer_numerics.zero_denominators import DividedByZero
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("finite", "overfit_one_batch", "update_ratio", "precision_parity", "every_param_moves")

CAUSES = {
    "eps_underflows": "eps is 0 in the dtype of the state, and a step divides by a second moment that is 0",
    "eps_missing": "eps is 0, and a step divides by a second moment that is 0",
    "step_count_saturates": "1 added to the count of steps gives the same count, in the dtype that it is kept in",
    "betas_swapped": "copies stepped without gradients make ever larger steps",
    "variants_differ": "the same step on copies in float64 goes elsewhere",
}

GROWN = 10.0
"""A step without a gradient, against the one before with it, from which steps count as growing without bound."""


@check(needs={"fit"}, causes=CAUSES, rank=50)
def optimizer_numerics(evidence: Evidence) -> Iterator[Finding]:
    record = evidence.run()
    if not record.steps:
        return
    from pytest_trainloop.checks.numerics.optimizer_numerics.betas import growing
    from pytest_trainloop.checks.numerics.optimizer_numerics.first_steps import FirstSteps

    first = evidence.shared(FirstSteps)
    divided = list(_epsilons(evidence, record, first))
    yield from divided
    yield from (_counter(record, *found) for found in first.counters())
    for one in first.found.values():
        for group in growing(one.snap):
            if group.by > 1.0:
                yield _betas(record, group, first.record.names(group.indices))
    if not divided:
        yield from _variants(record, first)


def _epsilons(evidence: Evidence, record: Record, first: FirstSteps) -> Iterator[Finding]:
    """Where eps is 0: what divides by it, or that nothing did so far."""
    zero = first.epsilons()
    if not zero:
        return
    from pytest_trainloop.checks.numerics.optimizer_numerics.zero_denominators import Denominators

    divided = evidence.shared(Denominators).found
    for missing in (False, True):
        found = [d for d in divided if (d.eps == 0.0) is missing]
        if found:
            yield _divided(record, found)
    if not divided:
        yield from (_unhurt(record, eps) for eps in zero if eps.given)


def _divided(record: Record, found: Sequence[DividedByZero]) -> Finding:
    first = min(found, key=lambda d: d.step)
    names = tuple(d.name for d in found)
    missing = first.eps == 0.0
    why = "eps = 0" if missing else f"eps = {first.eps:g} is 0 in {first.dtype}"
    zero = f", {first.without} of them with a gradient of exactly 0 (0/0)" if first.without else ""
    return Finding(
        cause="eps_missing" if missing else "eps_underflows",
        summary=f"{first.kind} divides by zero at {some(names)}: {why}, the dtype of its second moment"
        if not missing
        else f"{first.kind} divides by zero at {some(names)}: {why}, and the second moment is 0",
        measured=(
            f"step {first.step}: {first.count} of {first.entries} entries of {first.name} are not finite after it"
            f"{zero}; their second moment is 0 in {first.dtype}"
        ),
        shown_by="parameter and gradient were finite before the step, and the second moment of these entries is 0",
        culprits=names,
        where=record.step_line(),
        repair=(
            "give eps a value above 0 (Adam's default is 1e-8)"
            if missing
            else "keep weights and optimizer state in float32 and compute under autocast; or eps=1e-4, or fused=True"
        ),
        explains=CONSEQUENCES,
    )


def _unhurt(record: Record, eps: Epsilon) -> Finding:
    return Finding(
        cause="eps_underflows",
        level="advice",
        summary=f"eps = {eps.given:g} of {eps.kind} is 0 in {eps.dtype}, the dtype of its second moment",
        measured=f"{len(eps.names)} tensors; the smallest number above 0 in {eps.dtype} is 6e-08; none divided by 0",
        shown_by="the conversion of eps to that dtype",
        culprits=eps.names,
        where=record.step_line(),
        repair="keep weights and optimizer state in float32 and compute under autocast; or eps=1e-4, or fused=True",
    )


def _counter(record: Record, kind: str, dtype: str, last: int, names: tuple[str, ...]) -> Finding:
    return Finding(
        cause="step_count_saturates",
        summary=f"{kind} counts the steps of {some(names)} in {dtype}, where {last} + 1 is {last}",
        measured=f"state['step'] is a {dtype} tensor for {len(names)} parameters; bias corrections stop at step {last}",
        shown_by=f"the next number after {last} in {dtype} is {last + 2}",
        culprits=names,
        where=record.step_line(),
        repair="keep state['step'] in float32, as torch makes it: do not cast the whole state",
        explains=("update_ratio",),
    )


def _betas(record: Record, found: Growing, names: tuple[str, ...]) -> Finding:
    fault = found.for_sure and found.by >= GROWN
    given = f"betas = ({found.first:g}, {found.second:g})"
    return Finding(
        cause="betas_swapped",
        level="fault" if fault else "advice",
        summary=f"{given} of {found.kind}: steps grow by themselves where gradients vanish",
        measured=(
            f"b1 / sqrt(b2) = {found.ratio:.3f}, above 1; on copies without gradients the largest step is "
            f"{found.by:.3g} times the first, after {found.after} steps"
        ),
        shown_by="with no gradient the second moment is forgotten faster than the first",
        culprits=names,
        where=record.step_line(),
        repair=f"betas=({min(found.first, found.second):g}, {max(found.first, found.second):g})",
        explains=("finite", "overfit_one_batch", "update_ratio") if fault else (),
    )


def _variants(record: Record, first: FirstSteps) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.optimizer_numerics.step_variants import apart

    for one in first.found.values():
        found = list(apart(one.snap))
        for dtype in dict.fromkeys(f.dtype for f in found):
            yield _apart(record, [f for f in found if f.dtype == dtype], first.record)


def _apart(record: Record, found: Sequence[Apart], names: Record) -> Finding:
    """What is off in one dtype: the variant that the loop uses before all others."""
    first = max(found, key=lambda f: (f.in_use, f.off / f.update if f.update else 0.0))
    name = names.name(first.index)
    fault = first.in_use and first.variant == "fused" and "for-loop" in first.agreeing and first.off >= first.update / 2
    every = " and ".join(f.variant for f in sorted(found, key=lambda f: not f.in_use))
    used = "" if first.in_use else ", which this loop does not use,"
    right = f"; {' and '.join(first.agreeing)} {'is' if len(first.agreeing) == 1 else 'are'} right"
    size = "not finite" if math.isinf(first.off) else f"off by {first.off:.1e}"
    peaks = ", ".join(f"{variant} {size / 2**20:.1f} MiB" for variant, size in first.peaks.items())
    return Finding(
        cause="variants_differ",
        level="fault" if fault else "advice",
        summary=f"the {every} step of {first.kind}{used} goes wrong at {name} in {first.dtype}",
        measured=(
            f"{first.variant}: {size} after two steps, where the largest update is {first.update:.1e} and rounding "
            f"allows {first.allowed:.1e}{right if first.agreeing else ''}{f'; peak memory: {peaks}' if peaks else ''}"
        ),
        shown_by="the same two steps on copies in float64, by the for-loop",
        culprits=tuple(dict.fromkeys(names.name(f.index) for f in found)),
        where=record.step_line(),
        repair=_instead(first),
        explains=CONSEQUENCES if fault else (),
    )


def _instead(found: Apart) -> str:
    if not found.agreeing:
        return "keep weights and optimizer state in float32 and compute under autocast"
    other = "foreach=False, fused=False" if found.agreeing[0] == "for-loop" else f"{found.agreeing[0]}=True"
    return f"use the {found.agreeing[0]} step ({other})" if found.in_use else f"stay with {found.agreeing[0]}"
