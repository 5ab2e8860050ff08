"""One fixed batch can be learned.

What it does
    It runs the loop on one batch again and again, until its loss is halved. Where it is not, the same model, data and
    loss are run with plain Adam in place of the loop's own steps. One more such run has equal rows of the input.

Why is this bad?
    What cannot learn sixteen rows by heart will not learn a million. It takes seconds to see here, and days of curves
    that look merely slow elsewhere.

How it decides
    1. Batch i is run under seed i modulo 4. It passes as soon as the loss is half of what it was under each of the four
       seeds.
    2. It passes at half of the way to where plain Adam comes (the better of two learning rates, 150 steps). After 100
       steps it passes if the loss still falls by steps that change its weights, and plain Adam halves it.
    3. Otherwise one setting at a time is changed (docs/how-it-decides.md#one-fixed-batch). The first row of the table
       that holds is reported. A curve alone is no fault.
    4. The input is unused if plain Adam, too, stops above half of the first loss, at the loss of equal rows. It must
       also go the same way with every row in its neighbour's place.
    5. With ``steps`` given, at most 300, the project declares when the batch is learned: every row is a fault then.
    6. All searches end by steps, not by the clock: 3,614 at most.

    | first that holds | cause | advice if |
    |---|---|---|
    | the loss fell, then is NaN by an operation with finite inputs | ``nan_once_learned`` |  |
    | an earlier check says why; the loss does not fall | ``not_learning`` |  |
    | each step finds the weights of the first step, bit for bit | ``update_undone`` |  |
    | item 4 | ``input_unused`` |  |
    | the loop writes weights or gradients itself | ``learns_slowly`` | always |
    | a clip leaves 1 % or less; higher learning rates learn it | ``gradients_clipped_away`` |  |
    | without weight decay it learns | ``weight_decay_dominates`` |  |
    | held at its peak, the learning rate learns it | ``lr_decays_too_early`` | all add up to 5 peaks or more |
    | steps lead up the gradient, or the learning rate is 0 | ``not_learning`` |  |
    | a usual eps, or a higher or lower learning rate, learns it | ``not_learning`` |  |
    | none of these | ``learns_slowly`` | always |

When it is skipped
    It skips several losses for several optimizers, a ``fit`` that ends early, and a learning rate that still rises. It
    skips a loss that does not repeat with its seed, or does not change as its gradients say (policy gradients, moving
    targets). If an earlier check says why, it skips a falling loss that plain Adam does not halve either.

Faulty
    >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)   # step_size counts epochs
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
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.limits import OWN_STEPS
from pytest_trainloop.checks.learning.overfit_one_batch.causes import CAUSES, found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from pytest_trainloop.checks.learning.one_batch import OneBatch
    from pytest_trainloop.checks.learning.outcome import Learning
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

FEW = 5.0
"""Steps at the peak learning rate to which those of a run must add up; below, its schedule ends before anything
happened."""


@check(needs={"run"}, causes=CAUSES, rank=20, steps=100, long=True)
def overfit_one_batch(evidence: Evidence, *, steps: int | None = None) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.one_batch import OneBatchRuns
    from pytest_trainloop.checks.learning.outcome import learning, require_a_curve, single_loss
    from pytest_trainloop.checks.learning.overfit_one_batch.input_use import unused
    from pytest_trainloop.instruments.batches.own_data import require_given_data
    from pytest_trainloop.instruments.records.clips import clipped_to

    single_loss(evidence.run())
    batch = evidence.shared(OneBatchRuns).of(OWN_STEPS if steps is None else steps)
    curve = batch.curve
    if curve.halved:
        return
    behind = evidence.root_causes("overfit_one_batch")
    if not behind and evidence.repeatable and (nan := _nan_once_learned(batch)) is not None:
        yield nan
        return
    require_a_curve(curve)
    run = {"start": curve.start, "end": curve.end, "steps": curve.steps}
    if behind:
        root = behind[0]
        if curve.is_stuck:
            facts = run | {"by": root.check, "slug": root.cause, "said": root.summary}
            made = found("not_learning", root.where, root.culprits, "follows", **facts)
            yield replace(made, change=root.change, repair=root.repair)
        elif not batch.quick.halved:
            raise CannotDecide(f"{root.check} finds {root.cause}, and plain Adam does not halve the loss either")
        return
    if batch.ratios.undone:
        yield found("update_undone", batch.seen.step_line(), ("weights",), **run)
        return
    clip = clipped_to(batch.seen)
    clipped = clip is not None and clip.starves and curve.is_stuck
    going = batch.going and not clipped
    if going and batch.quick.halved:
        return
    learned = learning(batch)
    equal_rows = unused(batch, learned)
    if equal_rows is not None:
        variant = "lost before" if batch.lost_before else ""
        yield found("input_unused", "", ("model",), variant, **asdict(learned), equal_rows=equal_rows)
    elif learned.hopeless:
        require_given_data(evidence, "whether the model uses its input cannot be seen")
        raise CannotDecide(
            f"plain Adam takes no more than {learned.start - learned.reference:.2g} off the loss of "
            f"{learned.start:.3g} either (little to learn, or few weights that train); give a batch that the model can "
            "learn by heart"
        )
    elif not (learned.learned or going):
        stuck = _stuck(batch, learned)
        if steps is not None and stuck.level != "fault":  # the project declares in how many steps it is to be learned
            stuck = replace(
                stuck,
                level="fault",
                summary=f"{stuck.summary}, and steps={steps} declares that it is learned by then",
                repair="another learning rate, momentum or initialisation, until the batch is learned; or more steps="
                if stuck.cause == "learns_slowly"
                else stuck.repair,
            )
        yield stuck


def _nan_once_learned(batch: OneBatch) -> Finding | None:
    """A loss that fell and then is not finite, and the operation that made it so; what grew before is no such loss."""
    from pytest_trainloop.instruments.records.finiteness import became_nonfinite
    from pytest_trainloop.instruments.records.nonfinite_repairs import repair_of
    from pytest_trainloop.instruments.tracing.nonfinite import NonFiniteOrigins

    curve = batch.curve
    finite = list(itertools.takewhile(math.isfinite, curve.losses))
    if len(finite) == len(curve.losses) or len(finite) < 2 or finite[-1] >= finite[0]:
        return None
    origins = NonFiniteOrigins()
    batch.changed("not finite", origins.contexts)
    origin = origins.first
    if origin is None or origin.nonfinite_input:
        return None
    lost = len(became_nonfinite(curve.record))
    repair = repair_of(origin.op, origin.source, origin.low, origin.place.code)
    made = found(
        "nan_once_learned",
        origin,
        filter(None, (origin.op, origin.module)),
        "weights lost" if lost else "",
        lost_at=len(finite) + 1,
        origin=str(origin),
        value=origin.value,
        start=finite[0],
        last=finite[-1],
        before=len(finite),
        lost=lost,
        repair=repair.text,
    )
    return replace(made, do_not=repair.do_not)


def _stuck(batch: OneBatch, learned: Learning) -> Finding:
    """The first observation that names a cause; advice where there is none."""
    from pytest_trainloop.checks.learning.remedies import held, higher, lower, undecayed, usual_eps
    from pytest_trainloop.instruments.records.clips import clipped_to

    line, facts = batch.seen.step_line(), asdict(learned)

    def slow(why: str) -> Finding:
        facts["largest_lr"] = max(batch.curve.lrs, default=float("nan"))
        return found("learns_slowly", "", ("lr",), **facts, progress=learned.progress, why=why, level="advice")

    if learned.assigns:
        return slow("the loop also writes weights or gradients itself, which may slow it on purpose")
    clip = clipped_to(batch.seen)
    if clip is not None and clip.starves and learned.is_stuck and (helped := higher(batch, learned)) is not None:
        facts |= {"share": clip.share, "limit": clip.limit, "factor": helped.factor, "learned_in": helped.steps}
        return found("gradients_clipped_away", clip.where, (clip.by,), **facts)
    if learned.nowhere and (without := undecayed(batch, learned)) is not None:
        decay = max(d for o in batch.seen.optimizers for d in o.weight_decays)
        facts |= {"decay": decay, "learned_in": without.steps}
        return found("weight_decay_dominates", line, ("weight_decay",), "undecayed", **facts)
    if learned.decayed and (curve := held(batch, learned)) is not None:
        decays = _decays(batch)
        facts |= decays | {"learned_in": curve.steps, "level": "fault" if decays["whole"] < FEW else "advice"}
        return found("lr_decays_too_early", line, ("lr",), "held", **facts)
    if learned.astray:
        return found("not_learning", "", ("optimizer",), "astray", **facts)
    if learned.peak == 0:
        return found("not_learning", "", ("lr",), "rate 0", **facts)
    if learned.too_small and (eps := usual_eps(batch, learned)) is not None:
        return found("not_learning", "", ("eps",), "eps", **facts, eps=eps[0], learned_in=eps[1])
    for tried, change in ((learned.too_small, higher), (learned.too_far, lower)):
        if tried and (helped := change(batch, learned)) is not None:
            return found("not_learning", "", ("lr",), **facts, factor=helped.factor, learned_in=helped.steps)
    if learned.too_small:
        return slow("steps move next to nothing, and no higher learning rate that was tried changes that")
    return slow("steps lead down the gradient, at a learning rate that is neither too low nor too high")


def _decays(batch: OneBatch) -> dict[str, Any]:
    """The peak of the learning rates, and the first step after the last that is not below a hundredth of it: a warm-up
    begins below it, too."""
    from pytest_trainloop.checks.learning.outcome import DECAYED

    lrs = batch.curve.lrs
    peak = max(range(len(lrs)), key=lambda i: -1.0 if math.isnan(lrs[i]) else lrs[i])
    gone = max(i for i in range(peak, len(lrs)) if lrs[i] >= DECAYED * lrs[peak]) + 1
    whole = sum(lr for lr in lrs if not math.isnan(lr)) / lrs[peak]
    places = {"peak_at": peak + 1, "gone": gone + 1, "whole": whole}
    return places | {"peak_lr": lrs[peak], "gone_lr": lrs[gone], "last_lr": lrs[-1]}
