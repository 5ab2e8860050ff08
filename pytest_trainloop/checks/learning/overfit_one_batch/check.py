"""One fixed batch can be learned.

What it does
    It runs the loop on one batch again and again, until its loss is halved. Where it is not, the same model, data and
    loss are run with plain Adam in place of the loop's own steps, and once more with every row of the input the same.

Why is this bad?
    What cannot learn sixteen rows by heart will not learn a million. It takes seconds to see here, and days of curves
    that look merely slow elsewhere.

How it decides
    Batch i is run under seed i modulo 4, so that losses under one seed can be compared. The loop passes as soon as the
    loss is half of what it was under each of the four; as soon as it went half of the way to where plain Adam comes to
    (the better of two learning rates, 150 steps, from the same start); and, after 100 steps, if it still lowers its
    loss by steps that change its weights: it is merely slow, as fine-tuning is. It fails by one of these observations.
    The loss fell, and then it is NaN: the run is made again with every operation watched, and the first whose result is
    not finite is named (a mean over no triplets, the logarithm of a probability that has come to 0). That is a fault,
    as it is in ``finite``; a loop that leaves such a batch out backpropagates nothing there.
    A clip leaves a hundredth of the gradient or less, the loss stands still, and higher learning rates learn the batch.
    The learning rates of all steps add up to less than five at their peak, and held there they learn it. It stands
    still, and without weight decay it learns. Every step finds the weights, bit for bit, where the first did: each
    update is undone. Steps lead up the gradient. The learning rate is far too low or too high, as update_ratio says.
    Plain Adam, too, stops above half of the first loss, at the very loss that it comes to when all rows of the input
    are the same, and takes the same way there when every row stands in its neighbour's place: the model cannot use its
    input. Curves alone are no fault: the loss of many a correct loop stands on a plateau for thousands of steps. A loss
    is judged only where it is one. It must come again with its seed while no weight moves, and change by what its
    gradients say (the integral of gradient times displacement): policy gradients, targets that move and annealed
    weights do not, and are skipped, as are loops with several losses for several optimizers. Option: ``steps`` (300 of
    the loop's own at most): given, it declares in how many steps the batch is learned, and a loss that stands on a
    plateau then is a fault, which is advice else. All searches end by steps and not by the clock, so that a busy
    machine decides nothing: 150 of the faster plain Adam, 16 without any movement, 2 x 150 of both references, 2 x 24
    and 2 x 150 to see whether the input is used, and 200 for each change that is tried (8 higher and 3 lower learning
    rates, the rate held, another eps, no decay): 3,614 in all, and most of these runs end far earlier, at half of the
    loss.

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

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.limits import OWN_STEPS
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.learning.one_batch import Curve, OneBatch
    from pytest_trainloop.checks.learning.outcome import Learning
    from pytest_trainloop.checks.learning.remedies import Remedy
    from pytest_trainloop.records.clips import Clip
    from pytest_trainloop.runs.evidence import Evidence

FEW = 5.0
"""Steps at the peak learning rate to which those of a run must add up; below, its schedule ends before anything
happened."""

CAUSES = {
    "nan_once_learned": Cause(
        proof="on one fixed batch the loss falls and is NaN from some step on, by an operation whose inputs are finite",
        explains=("update_ratio",),
        change=("seen",),
        source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/107",
    ),
    "input_unused": Cause(
        proof="plain Adam goes the same way whatever row stands beside a label, and no further than with one row",
        repair=(
            "look for what makes rows equal: shapes (N, 1) against (N,) that broadcast in the loss, units that are all "
            "dead or saturated, a mask that hides everything, integers that were divided (uint8 // 255)"
        ),
        explains=("update_ratio",),
        source="https://github.com/IntelLabs/matsciml/pull/347",
    ),
    "lr_decays_too_early": Cause(
        proof="the learning rates add up to a few steps at their peak, and held there they learn the batch",
        repair="step the schedule as often as it counts (once an epoch?), or give it its lengths in optimizer steps",
        explains=("update_ratio",),
        change=(
            "scheduler",
            "optimizer",
        ),
        settle='overfit_one_batch={"steps": 400} declares in how many steps it must be learned',
        source="https://github.com/jaehyunnn/ViTPose_pytorch/issues/20",
    ),
    "gradients_clipped_away": Cause(
        proof="gradients are clipped to a hundredth or less; higher learning rates, which undo that, learn the batch",
        repair="clip at the size of ordinary gradients (1.0 for most models), or raise the learning rate",
        explains=("update_ratio",),
        change=("seen",),
        source="https://github.com/strands-labs/robots/pull/2028",
    ),
    "not_learning": Cause(
        proof="steps lead up the gradient, or other learning rates learn the batch, or an earlier check says why",
        repair="see update_ratio",
        change=(
            "step",
            "optimizer",
        ),
    ),
    "update_undone": Cause(
        proof="steps move the weights, and each finds them bit for bit where the first had found them",
        repair="look for what writes the weights after the step: a load_state_dict, an average copied back, a restore",
        explains=("update_ratio",),
        source="https://github.com/MultimediaTechLab/YOLO/issues/97",
    ),
    "weight_decay_dominates": Cause(
        proof="without weight decay, and with nothing else changed, the batch is learned",
        repair="a smaller weight_decay (AdamW's default is 0.01; each step takes lr * weight_decay off the weights)",
        explains=("update_ratio",),
        change=("optimizer",),
        source="https://github.com/tinghuiz/SfMLearner/issues/34",
    ),
    "learns_slowly": Cause(
        proof="the loss stands on a plateau in steps in which plain Adam goes much further",
        repair="another learning rate, or momentum",
        change=("optimizer",),
        settle='overfit_one_batch={"steps": 400} declares in how many steps it must be learned',
        source="https://github.com/emalgorithm/structured-neural-summarization-replication/issues/3",
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=20, steps=100, long=True)
def overfit_one_batch(evidence: Evidence, *, steps: int | None = None) -> Iterator[Finding]:
    from pytest_trainloop.batches.own_data import require_given_data
    from pytest_trainloop.checks.learning.one_batch import OneBatchRuns
    from pytest_trainloop.checks.learning.outcome import learning, require_a_curve, single_loss
    from pytest_trainloop.checks.learning.overfit_one_batch.input_use import unused
    from pytest_trainloop.records.clips import clipped_to

    single_loss(evidence.run())
    batch = evidence.shared(OneBatchRuns).of(OWN_STEPS if steps is None else steps)
    if batch.curve.halved:
        return
    if evidence.repeatable and (nan := _once_learned(batch)) is not None:
        yield nan
        return
    require_a_curve(batch.curve)
    if behind := evidence.root_causes("overfit_one_batch"):
        if batch.curve.stands_still:
            yield _follows(batch, behind[0])
        return
    if batch.ratios.undone:
        yield _undone(batch)
        return
    clip = clipped_to(batch.seen)
    clipped = clip is not None and clip.starves and batch.curve.stands_still
    going = batch.going and not clipped
    if going and batch.quick.halved:
        return
    found = learning(batch)
    equal_rows = unused(batch, found)
    if equal_rows is not None:
        yield _unused(batch, found, equal_rows)
    elif found.hopeless:
        require_given_data(evidence, "whether the model uses its input cannot be seen")
        raise CannotDecide(
            f"plain Adam takes no more than {found.start - found.reference:.2g} off the loss of {found.start:.3g} "
            "either (little to learn, or few weights that train); give a batch that the model can learn by heart"
        )
    elif not (found.learned or going):
        stuck = _stuck(batch, found)
        yield stuck if steps is None or stuck.level == "fault" else _too_slow(stuck, steps)


def _reached(found: Learning) -> str:
    return (
        f"loss {found.start:.4g} at the start, {found.end:.4g} after {found.steps} steps; plain Adam (lr "
        f"{found.rate:g}) comes to {found.reference:.4g}"
    )


def _once_learned(batch: OneBatch) -> Finding | None:
    """A loss that fell and then is not finite, and the operation that made it so; what grew before is no such loss."""
    from pytest_trainloop.records.finiteness import became_nonfinite
    from pytest_trainloop.records.nonfinite_repairs import repair_of
    from pytest_trainloop.tracing.nonfinite import NonFiniteOrigins

    curve = batch.curve
    finite = list(itertools.takewhile(math.isfinite, curve.losses))
    if len(finite) == len(curve.losses) or len(finite) < 2 or finite[-1] >= finite[0]:
        return None
    origins = NonFiniteOrigins()
    batch.changed("not finite", origins.contexts)
    origin = origins.first
    if origin is None or origin.nonfinite_input:
        return None
    lost = became_nonfinite(curve.record)
    repair = repair_of(origin.op, origin.source, origin.low, origin.place.code)
    return Finding(
        cause="nan_once_learned",
        summary=f"on one fixed batch the loss falls and is not finite from step {len(finite) + 1} on: {origin} makes "
        f"{origin.value} of finite values",
        measured=f"loss {finite[0]:.4g} at the start, {finite[-1]:.4g} in step {len(finite)}; "
        + (
            f"{len(lost)} parameters hold NaN or inf after it"
            if lost
            else "it was backpropagated, and no weight is lost"
        ),
        shown_by="in a further run on this batch it is the first operation whose result is not finite while all its "
        "inputs are",
        culprits=tuple(name for name in (origin.op, origin.module) if name),
        where=str(origin.place),
        repair=repair.text,
        do_not=repair.do_not,
    )


def _follows(batch: OneBatch, behind: Finding) -> Finding:
    curve = batch.curve
    return Finding(
        cause="not_learning",
        summary=f"one fixed batch is not learned; {behind.check} says why: {behind.summary}",
        measured=f"loss {curve.start:.4g} at the start, {curve.end:.4g} after {curve.steps} steps",
        shown_by=f"{behind.check} finds {behind.cause} in the same loop",
        culprits=behind.culprits,
        where=behind.where,
        change=behind.change,
        repair=behind.repair,
    )


def _undone(batch: OneBatch) -> Finding:
    curve = batch.curve
    return Finding(
        cause="update_undone",
        summary="every update is undone before the next step: the weights are always where they began",
        measured=f"loss {curve.start:.4g} at the start, {curve.end:.4g} after {curve.steps} steps",
        shown_by="steps move the weights, and each finds them bit for bit where the first had found them",
        culprits=("weights",),
        where=batch.seen.step_line(),
    )


def _unused(batch: OneBatch, found: Learning, equal_rows: float) -> Finding:
    lost = batch.lost_before
    return Finding(
        cause="input_unused",
        summary=(
            "the model cannot use its input: all rows that reach its first layer are the same"
            if lost
            else "the model cannot use its input: whatever the rows hold, the loss is the same"
        ),
        measured=(
            f"plain Adam comes from {found.start:.4g} to {found.reference:.4g}"
            + ("" if lost else f", with all rows equal to {equal_rows:.4g}")
        ),
        shown_by=(
            "the rows of the batch differ, and those that come in at layers with weights do not"
            if lost
            else "with each row in its neighbour's place and the labels in theirs, the loss goes the same way"
        ),
        culprits=("model",),
    )


def _stuck(batch: OneBatch, found: Learning) -> Finding:
    """The first observation that names a cause; advice where there is none."""
    from pytest_trainloop.checks.learning.remedies import held, higher, lower, undecayed, usual_eps
    from pytest_trainloop.records.clips import clipped_to

    if found.assigns:
        return _slow(batch, found, "the loop also writes weights or gradients itself, which may be meant to slow it")
    clip = clipped_to(batch.seen)
    if clip is not None and clip.starves and found.stands_still:
        helped = higher(batch, found)
        if helped is not None:
            return _clipped(found, clip, helped)
    if found.nowhere and (without := undecayed(batch, found)) is not None:
        return _decay_dominates(batch, found, without)
    if found.decayed and (curve := held(batch, found)) is not None:
        return _decays(batch, found, curve)
    if found.astray:
        return _astray(found)
    if found.peak == 0:
        return _without_rate(found)
    if found.too_small and (eps := usual_eps(batch, found)) is not None:
        return _by_eps(found, *eps)
    if found.too_small and (helped := higher(batch, found)) is not None:
        return _by_rates(found, helped)
    if found.too_far and (helped := lower(batch, found)) is not None:
        return _by_rates(found, helped)
    if found.too_small:
        return _slow(
            batch, found, "steps move next to nothing, and no higher learning rate that was tried changes that"
        )
    return _slow(batch, found, "steps lead down the gradient, at a learning rate that is neither too low nor too high")


def _too_slow(found: Finding, steps: int) -> Finding:
    """What is advice, where the project declares in how many steps the batch is to be learned."""
    return replace(
        found,
        level="fault",
        summary=f"{found.summary}, and steps={steps} declares that it is learned by then",
        repair="another learning rate, momentum or initialisation, until the batch is learned; or more steps="
        if found.cause == "learns_slowly"
        else found.repair,
    )


def _clipped(found: Learning, clip: Clip, helped: Remedy) -> Finding:
    return Finding(
        cause="gradients_clipped_away",
        summary=f"the clip leaves {clip.share:.1g} of the gradient, and the loop does not learn its batch",
        measured=f"{_reached(found)}; the clip's bound is {clip.limit:g}, its share {clip.share:.1g}",
        shown_by=f"at {helped.factor:g} times the learning rate the batch is learned in {helped.steps} steps",
        culprits=(clip.by,),
        where=clip.where,
    )


def _decay_dominates(batch: OneBatch, found: Learning, without: Curve) -> Finding:
    decay = max(d for o in batch.seen.optimizers for d in o.weight_decays)
    return Finding(
        cause="weight_decay_dominates",
        summary=f"weight decay of {decay:g} dominates the gradient: the loop does not learn its batch",
        measured=_reached(found),
        shown_by=f"without decay, and with nothing else changed, the batch is learned in {without.steps} steps",
        tried=f"with weight_decay=0 the batch is learned in {without.steps} steps",
        culprits=("weight_decay",),
        where=batch.seen.step_line(),
    )


def _decays(batch: OneBatch, found: Learning, curve: Curve) -> Finding:
    rates = batch.curve.rates
    peak = max(range(len(rates)), key=lambda i: -1.0 if math.isnan(rates[i]) else rates[i])
    gone = _gone(rates, peak)
    whole = sum(rate for rate in rates if not math.isnan(rate)) / rates[peak]
    return Finding(
        cause="lr_decays_too_early",
        level="fault" if whole < FEW else "advice",
        summary=f"lr is below a hundredth of its peak from step {gone + 1} on, before the batch is learned",
        measured=(
            f"{_reached(found)}; lr {rates[peak]:.1e} at its peak in step {peak + 1}, {rates[gone]:.1e} in step "
            f"{gone + 1}, {rates[-1]:.1e} at the end: all steps add up to {whole:.1f} at the peak"
        ),
        shown_by=f"with the learning rate held at its peak the batch is learned in {curve.steps} steps",
        tried=f"with the learning rate held at its peak the batch is learned in {curve.steps} steps",
        culprits=("lr",),
        where=batch.seen.step_line(),
    )


def _gone(rates: Sequence[float], peak: int) -> int:
    """The first step after the last that is not below a hundredth of the peak: a warm-up begins below it, too."""
    from pytest_trainloop.checks.learning.outcome import DECAYED

    return max(i for i in range(peak, len(rates)) if rates[i] >= DECAYED * rates[peak]) + 1


def _astray(found: Learning) -> Finding:
    return Finding(
        cause="not_learning",
        summary="the optimizer does not lower the loss of one fixed batch: its steps lead up the gradient",
        measured=_reached(found),
        shown_by=(
            "plain Adam learns with the same model and data; the direction agreement between the loop's steps and the "
            f"way down the gradient is {found.descent:.2f} in the mean (1 = same, -1 = opposite)"
        ),
        culprits=("optimizer",),
        repair="look at the sign of the update, at what it is applied to, and at what writes the weights afterwards",
    )


def _without_rate(found: Learning) -> Finding:
    return Finding(
        cause="not_learning",
        summary=f"one fixed batch is not learned: the learning rate is 0 in all of {found.steps} steps",
        measured=_reached(found),
        shown_by="plain Adam learns with the same model and data",
        culprits=("lr",),
    )


def _by_rates(found: Learning, helped: Remedy) -> Finding:
    return Finding(
        cause="not_learning",
        summary=f"one fixed batch is not learned at this learning rate, and is at {helped.factor:g} times as much",
        measured=_reached(found),
        shown_by=f"at {helped.factor:g} times the learning rate the batch is learned in {helped.steps} steps",
        culprits=("lr",),
    )


def _by_eps(found: Learning, eps: float, steps: int) -> Finding:
    return Finding(
        cause="not_learning",
        summary=f"one fixed batch is not learned with eps = {eps:g}, and is with a usual one",
        measured=_reached(found),
        shown_by=f"with eps = 1e-8 in its place the batch is learned in {steps} steps",
        culprits=("eps",),
    )


def _slow(batch: OneBatch, found: Learning, shown: str) -> Finding:
    rate = max(batch.curve.rates, default=float("nan"))
    return Finding(
        cause="learns_slowly",
        level="advice",
        summary=f"one fixed batch is learned slowly: {found.progress:.0%} of the way that plain Adam goes",
        measured=f"{_reached(found)}; this loop's learning rate is {rate:.1e} at most",
        shown_by=shown,
        culprits=("lr",),
    )
