"""One fixed batch can be learned.

What it does
    It runs the loop on one batch again and again, until its loss is halved. Where it is not, the same model, data and
    loss are run with plain Adam in place of the loop's own steps, and once more with every row of the input the same.

Why is this bad?
    What cannot learn sixteen rows by heart will not learn a million. It takes seconds to see here, and days of curves
    that look merely slow elsewhere.

How it decides
    Batch i is run under seed i modulo 4, so that losses under one seed can be compared. The loop passes as soon as the
    loss is half of what it was under each of the four, or has gone half of the way to where plain Adam comes to (the
    better of two rates, 150 steps, from the same start).
    It fails where it went less than a quarter of that way in 200 steps and nothing more is coming: the loss stands
    still, goes up, or the steps are too small to change a weight. Then one setting after the other is changed on a
    fresh loop, and the one that makes it learn is the cause. A loop that is merely slow gets advice.
    It fails also where plain Adam, too, stops above half of the first loss, at the very loss that it comes to when all
    rows of the input are the same: the model cannot use its input.
    A loss is judged only where it is one. It must come again with its seed while no weight moves, and change by what
    its gradients say (the integral of gradient times displacement): policy gradients, targets that move and annealed
    weights do not, and are skipped, as are loops with several losses for several optimizers.

Faulty
    >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)   # meant for epochs
    >>> for group in optimizer.param_groups:
    ...     group["lr"] = 0.01
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    ...     schedule.step()

Fixed
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    Twice a softmax, a ReLU on the output or an inverted temperature can be learned by heart and pass. A loss that falls
    without bound has no end to be measured against.

References
    https://karpathy.github.io/2019/04/25/recipe/
    https://arxiv.org/abs/1412.6980
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks import check
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.evidence import Evidence
    from pytest_trainloop.evidence.cures import Cure
    from pytest_trainloop.evidence.learning import Learning
    from pytest_trainloop.evidence.onebatch import OneBatch

SECONDS = 60.0
"""What a reference may take; more with the option ``seconds``."""

CAUSES = {
    "input_unused": "plain Adam comes to the same loss when every row of the input is the first row",
    "rate_decays": "the loss is halved once the rates are held at their peak, and nothing else is changed",
    "clipped_away": "gradients are clipped to a hundredth or less, and higher rates, which undo that, halve the loss",
    "not_learning": "plain Adam lowers the loss of the same model on the same batch, and the loop does not",
    "slow": "the loop lowers the loss, but by less than half of what plain Adam does in as many steps",
}


@check(needs={"run"}, causes=CAUSES, family="learning", rank=20)
def overfit_one_batch(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.evidence.inputs import unused
    from pytest_trainloop.evidence.learning import learning, single_loss

    single_loss(evidence.run())
    batch = evidence.one_batch()
    if batch.curve.halved:
        return
    seconds = float(evidence.options.get("seconds", SECONDS))
    found = learning(batch, seconds)
    if found.stuck and (behind := evidence.behind("overfit_one_batch")):
        yield _follows(found, behind[0])
        return
    alike = unused(batch, found)
    if alike is not None:
        yield _unused(found, alike)
    elif found.hopeless:
        raise CannotDecide(
            f"plain Adam takes no more than {found.start - found.reference:.2g} off the loss of {found.start:.3g} "
            "either; give a batch that the model can learn by heart"
        )
    elif found.stuck:
        yield _stuck(batch, found, seconds)
    elif not found.learned:
        yield _slow(found)


def _reached(found: Learning) -> str:
    return (
        f"loss {found.start:.4g} at the start, {found.end:.4g} after {found.steps} steps; plain Adam (rate "
        f"{found.rate:g}) comes to {found.reference:.4g}"
    )


def _follows(found: Learning, behind: Finding) -> Finding:
    return Finding(
        cause="not_learning",
        summary=f"one fixed batch is not learned; {behind.check} says why: {behind.summary}",
        measured=_reached(found),
        shown_by=f"{behind.check} finds {behind.cause} in the same loop",
        culprits=behind.culprits,
        where=behind.where,
        repair=f"mend that first: {behind.repair}" if behind.repair else "mend that first",
    )


def _unused(found: Learning, alike: float) -> Finding:
    return Finding(
        cause="input_unused",
        summary="the model cannot use its input: whatever the rows hold, the loss is the same",
        measured=(
            f"plain Adam comes from {found.start:.4g} to {found.reference:.4g}, with all rows alike to {alike:.4g}"
        ),
        shown_by="the optimizer is not at fault, plain Adam stops there too; the batch has rows that differ",
        culprits=("model",),
        repair=(
            "look for what makes rows alike: shapes (N, 1) against (N,) that broadcast in the loss, units that are all "
            "dead or saturated, a mask that hides everything, labels that were shuffled apart from their rows"
        ),
        explains=("update_ratio",),
    )


def _stuck(batch: OneBatch, found: Learning, seconds: float) -> Finding:
    from pytest_trainloop.evidence.clips import clipped_to
    from pytest_trainloop.evidence.cures import cure

    helped = None if found.by_hand else cure(batch, found, seconds)
    clip = clipped_to(batch.seen)
    if helped is not None and helped.what == "held":
        return _decays(batch, found, helped)
    if helped is not None and helped.what == "higher" and clip is not None and clip.share <= 0.01:
        return Finding(
            cause="clipped_away",
            summary=f"the clip leaves {clip.share:.1g} of the gradient, and the loop does not learn its batch",
            measured=f"{_reached(found)}; the clip's bound is {clip.limit:g}",
            shown_by=f"with rates {helped.factor:g} times as high the batch is learned in {helped.steps} steps",
            culprits=(clip.by,),
            where=clip.where,
            repair="clip at the size of ordinary gradients (1.0 for most models), or raise the rate",
            explains=("update_ratio",),
        )
    return _not_learning(found, helped)


def _decays(batch: OneBatch, found: Learning, helped: Cure) -> Finding:
    rates = batch.curve.rates
    gone = next(i for i, rate in enumerate(rates) if rate < 0.01 * max(rates))
    return Finding(
        cause="rate_decays",
        summary=f"the rate is below a hundredth of its peak from step {gone + 1} on, before anything is learned",
        measured=f"{_reached(found)}; rate {max(rates):.1e} at its peak, {rates[-1]:.1e} at the end",
        shown_by=f"with the rates held at their peak the batch is learned in {helped.steps} steps",
        culprits=("lr",),
        where=next((str(s.place) for s in batch.seen.consuming_steps()), ""),
        repair="give the schedule the number of steps that the loop makes, and step it as often as it counts",
        explains=("update_ratio",),
    )


def _not_learning(found: Learning, helped: Cure | None) -> Finding:
    if helped is not None:
        shown = f"with rates {helped.factor:g} times as high the batch is learned in {helped.steps} steps"
    else:
        shown = (
            "model and data are not at fault, since plain Adam learns; ruled out: the rate (1e-3 to 1e6 times), decay"
        )
    return Finding(
        cause="not_learning",
        level="advice" if found.by_hand else "fault",
        summary=(
            f"the loss of one fixed batch {'rises' if found.diverged else 'stays up'} where plain Adam lowers it: the "
            "optimizer or what the loop does around it is at fault"
        ),
        measured=_reached(found),
        shown_by=shown,
        culprits=("optimizer",),
        repair=(
            "compare the optimizer's settings with plain Adam at that rate; look at what writes gradients and weights"
        ),
    )


def _slow(found: Learning) -> Finding:
    return Finding(
        cause="slow",
        level="advice",
        summary=f"one fixed batch is learned slowly: {found.progress:.0%} of the way that plain Adam goes",
        measured=_reached(found),
        shown_by="the loss still falls" if found.falling else "the loss stands still there",
        culprits=("lr",),
        repair="nothing, if that is meant (a rate for pretrained weights); else a higher rate",
    )
