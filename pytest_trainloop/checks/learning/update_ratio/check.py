"""Steps are as large as weights need them.

What it does
    On one fixed batch it measures by how much of its size a step moves each weight matrix, and at which learning rates.
    Where the batch is not learned, it tries other learning rates on fresh loops.

Why is this bad?
    A learning rate that is a thousand times too low looks like a hard problem: the loss falls a little, for weeks. One
    that is too high looks like a broken model.

How it decides
    Nine in ten correct loops that are small leave the textbook's band of 1e-4 to 1e-2, so it is not asked for. The
    learning rate is too low where no measured step moves the weight matrices of a group by more than 2e-6 of their size
    (a hundred thousand such steps, all in one direction, would move them by a fifth), where the loss of one batch falls
    by less than a twentieth in 300 steps and plain Adam lowers it, and where a learning rate that is higher by a power
    of ten, and nothing else, learns it. An eps above 1e-3 is too large if a usual one alone learns it.
    The learning rate is too high where the loss of that batch ends above its start, or stands still after steps that
    are as large as the weights, and a lower one learns it. Learning rates that still rise after 300 steps, schedules
    that have ended by then, and loops that have no single loss to lower are left alone. A LambdaLR
    whose largest factor is the base rate itself is named where the rate is too low. Each learning rate that is
    tried gets 200 steps, whatever time they take: overfit_one_batch adds up what all searches may make.
    Advice: pretrained weights (the same under another seed) train at the learning rate of a randomly initialised
    head.

Faulty
    >>> for group in optimizer.param_groups:
    ...     group["lr"] = 1e-7                                            # meant for Adam in 32 bits of another scale
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Fixed
    >>> for group in optimizer.param_groups:
    ...     group["lr"] = 0.1
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    A single batch shows when nothing happens and when everything breaks, not which learning rate is best. One that fits
    pretrained weights is low for weights that are not.

References
    https://arxiv.org/abs/1506.01186
    https://cs231n.github.io/neural-networks-3/#ratio
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.learning.one_batch import OneBatch
    from pytest_trainloop.checks.learning.outcome import Learning
    from pytest_trainloop.checks.learning.remedies import Remedy
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "same_lr_for_pretrained_and_new": Cause(
        proof="weights that are the same under another seed train at the learning rate of randomly initialised ones",
        repair="two parameter groups: a learning rate about ten times as high for what is new",
        change=("optimizer",),
        source="https://github.com/facebookresearch/detr/issues/95",
    ),
    "lr_too_low": Cause(
        proof="no step moves the weights by more than 2e-6 of their size, and higher learning rates learn the batch",
        explains=("overfit_one_batch:not_learning", "overfit_one_batch:learns_slowly"),
        change=("optimizer",),
        source="https://cs231n.github.io/neural-networks-3/#ratio",
    ),
    "lambda_gives_the_rate": Cause(
        proof="the largest factor that the lambda of LambdaLR returns is the base rate itself, and higher rates learn",
        repair="let the function return a factor on the rate: LambdaLR(optimizer, lambda step: rate(step) / lr)",
        explains=(
            "overfit_one_batch:not_learning",
            "overfit_one_batch:learns_slowly",
            "schedule:rate_is_the_factor",
        ),
        change=("scheduler",),
        source="https://github.com/lhoyer/MIC/issues/60",
    ),
    "eps_too_large": Cause(
        proof="no step moves the weights by more than 2e-6 of their size, and with a usual eps alone they learn",
        repair="eps=1e-8, or a learning rate that makes up for it: where eps dominates, steps go as lr / eps",
        explains=("overfit_one_batch:not_learning", "overfit_one_batch:learns_slowly"),
        change=("optimizer",),
        source="https://github.com/mlpnlp/mlpnlp-nmt/pull/4",
    ),
    "lr_too_high": Cause(
        proof="the loss of one batch rises or stands still under large steps, and only lower learning rates learn it",
        explains=("overfit_one_batch:not_learning", "overfit_one_batch:learns_slowly"),
        change=("optimizer",),
        source="https://github.com/juntang-zhuang/LadderNet/issues/1",
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=10, steps=100, long=True)
def update_ratio(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.one_batch import OneBatchRuns
    from pytest_trainloop.checks.learning.outcome import learning, require_a_curve, single_loss
    from pytest_trainloop.checks.learning.remedies import higher, lower, undecayed, usual_eps
    from pytest_trainloop.records.clips import clipped_to
    from pytest_trainloop.tracing.made_at import MadeAt

    yield from _same_lr(evidence)
    single_loss(evidence.run())
    batch = evidence.shared(OneBatchRuns).of()
    if batch.curve.halved or batch.going:
        return
    require_a_curve(batch.curve)
    if behind := evidence.root_causes("update_ratio"):
        raise CannotDecide(f"{behind[0].check} finds {behind[0].cause}, which explains that the batch is not learned")
    found = learning(batch)
    if found.hopeless:
        raise CannotDecide("plain Adam does not lower the loss either; give a batch that the model can learn by heart")
    if found.assigns or found.learned or found.astray or found.decayed or batch.ratios.undone:
        return
    if found.nowhere and undecayed(batch, found) is not None:
        return
    clip = clipped_to(batch.seen)
    if found.peak == 0:
        line = evidence.shared(MadeAt.of).scheduler() or _written_by_hand(evidence)
        yield replace(_nothing(batch, found), change=line)
    elif found.too_far:
        helped = lower(batch, found)
        if helped is not None:
            yield replace(_too_high(batch, found, helped), change=_written_by_hand(evidence))
    elif found.too_small and not (clip is not None and clip.starves):
        if (eps := usual_eps(batch, found)) is not None:
            yield _eps(batch, found, *eps)
            return
        helped = higher(batch, found)
        if helped is not None:
            yield _rate_as_factor(evidence, _too_low(batch, found, helped))


def _same_lr(evidence: Evidence) -> Iterator[Finding]:
    """Advice where a pretrained trunk and a randomly initialised head train at one learning rate."""
    from pytest_trainloop.runs.weight_origins import weight_origins

    record, origins = evidence.run(), evidence.shared(weight_origins)
    steps = {step.optimizer: step for step in reversed(record.innermost_steps())}
    rates: dict[str, dict[float, list[str]]] = {"pretrained": {}, "random": {}}
    for optimizer in record.optimizers:
        groups = steps[optimizer.index].lrs if optimizer.index in steps else ()
        for index, group in zip(optimizer.parameters, optimizer.groups, strict=True):
            name = record.name(index)
            if name in origins and group < len(groups):
                rates[origins[name]].setdefault(groups[group], []).append(name)
    both = rates["pretrained"].keys() | rates["random"].keys()
    if len(both) != 1 or not rates["pretrained"] or not rates["random"]:
        return
    rate = next(iter(both))
    pretrained, new = rates["pretrained"][rate], rates["random"][rate]
    if len(pretrained) > len(new):
        yield Finding(
            cause="same_lr_for_pretrained_and_new",
            level="advice",
            summary=(
                f"{len(pretrained)} pretrained weight matrices train at the learning rate of {some(new)}, which "
                f"{be(new)} randomly initialised"
            ),
            measured=f"lr {rate:.1e} for all at the first step",
            shown_by="built under another seed, the former are the same bit for bit and the latter are not",
            culprits=tuple(new),
        )


def _measured(batch: OneBatch, found: Learning) -> str:
    groups = sorted({(r.optimizer, r.group) for r in batch.ratios.seen})
    sizes = [
        f"{max(r.ratio for r in batch.ratios.seen if (r.optimizer, r.group) == at):.1e}"
        + (f" in group {at[1]}" if len(groups) > 1 else "")
        for at in groups[:4]
    ]
    return (
        f"a step moves the weight matrices by {', '.join(sizes)} of their size at lr {max(batch.curve.rates):.1e}; "
        f"loss {found.start:.4g} at the start, {found.end:.4g} after {found.steps} steps"
    )


def _shown(helped: Remedy) -> str:
    low, high = helped.band
    band = f"; lr from {low:.0e} to {high:.0e} learn it" if high > low else f"; lr {low:.0e} learns it"
    return f"at {helped.factor:g} times the learning rate the batch is learned in {helped.steps} steps{band}"


def _too_low(batch: OneBatch, found: Learning, helped: Remedy) -> Finding:
    return Finding(
        cause="lr_too_low",
        summary=f"the learning rate is too low to learn: at {helped.factor:g} times it the batch is learned",
        measured=_measured(batch, found),
        shown_by=_shown(helped),
        culprits=("lr",),
        where=batch.seen.step_line(),
        repair=f"lr={helped.band[0]:.0e} here; lr up to {helped.band[1]:.0e} learns the batch",
        tried=f"with lr={helped.band[0]:.0e} the batch is learned in {helped.steps} steps",
    )


def _written_by_hand(evidence: Evidence) -> str:
    """The line of the loop that writes the rates, where one moves them; else empty."""
    from pytest_trainloop.records.learning_rates import rates

    if not any("hand" in group.movers for group in rates(evidence.run())):
        return ""
    from pytest_trainloop.tracing.rate_writes import RateWrites

    return evidence.shared(RateWrites.of).line()


def _rate_as_factor(evidence: Evidence, low: Finding) -> Finding:
    """The finding of a rate that is too low, by the lambda that makes it so, where one does."""
    from pytest_trainloop.checks.learning.update_ratio.rate_as_factor import rate_as_factor

    given = rate_as_factor(evidence)
    if given is None:
        return low
    projected, base, peak = given
    return replace(
        low,
        cause="lambda_gives_the_rate",
        summary=(
            f"the function of LambdaLR returns the learning rate where a factor on it is meant: {base:g} times "
            f"{base:g} makes {peak:g}"
        ),
        shown_by=f"its largest factor is the base rate, {base:g}; {low.shown_by.partition('; lr')[0]}",
        tried="",  # a rate that makes up for the factor is no repair
        where=projected.place,
        change=projected.made_at,
        repair="",
    )


def _eps(batch: OneBatch, found: Learning, eps: float, steps: int) -> Finding:
    return Finding(
        cause="eps_too_large",
        summary=f"eps = {eps:g} is so much larger than the root of the second moment that steps come to nothing",
        measured=_measured(batch, found),
        shown_by=f"with eps = 1e-8 in its place and nothing else changed the batch is learned in {steps} steps",
        tried=f"with eps=1e-8 the batch is learned in {steps} steps",
        culprits=("eps",),
        where=batch.seen.step_line(),
    )


def _nothing(batch: OneBatch, found: Learning) -> Finding:
    return Finding(
        cause="lr_too_low",
        summary=f"the learning rate is 0 in all of {found.steps} steps",
        measured=_measured(batch, found),
        shown_by="no group of the optimizer has a learning rate above 0 at any step, and it does not rise",
        culprits=("lr",),
        where=batch.seen.step_line(),
        repair="look at what sets it: a warm-up that divides integers, a factor of 0, a schedule that has ended",
    )


def _too_high(batch: OneBatch, found: Learning, helped: Remedy) -> Finding:
    return Finding(
        cause="lr_too_high",
        summary=(
            f"the learning rate is too high: one batch's loss {'rises' if found.diverged else 'does not fall'}, and at "
            f"{helped.factor:g} times it is learned"
        ),
        measured=_measured(batch, found),
        shown_by=_shown(helped),
        culprits=("lr",),
        where=batch.seen.step_line(),
        repair=f"lr={helped.band[1]:.0e} here, or lower; or a warm-up, a clip",
        tried=f"at {helped.factor:g} times the learning rate the batch is learned in {helped.steps} steps",
    )
