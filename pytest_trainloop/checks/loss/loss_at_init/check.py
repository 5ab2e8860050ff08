"""Before the first step the loss is what chance gives.

What it does
    It looks at every call of a loss function of torch before the first optimizer step, and makes the same call with
    an input that knows nothing: equal scores for all classes, even odds, zero or the mean of the targets.

Why is this bad?
    A net that begins far above chance is sure of wrong answers: the first thousand steps take back what the
    initialisation, the inputs' scale or a temperature put in, some units are dead by then, and the rate that survives
    it is too low for the rest.

How it decides
    Chance comes from the call itself, so weights, smoothing, ignored labels, the number of negatives and the reduction
    are in both alike. More than 10 times chance (10 times its root for squared errors) is a fault where it comes from
    drawn weights: what goes into the loss must shrink by a third at least once the weights of all layers are halved.
    Where it does not (a cosine under a fixed scale, a margin, a learned temperature) it is by design, and advice, as is
    more than 3 times chance, what loaded weights or torch's own tables of embeddings give (tied to the output, they
    have unit variance), and what inputs give that are not of unit size. So are outputs of at most unit size, where the
    usual initialisations (Glorot, He) end: not the weights are large, the targets are small. Targets that change with
    the weights (a target net, a codebook) are left alone. Far below the entropy of the labels, by 5 standard errors of
    their mean and under five seeds, is advice: the labels may stand in the input.
    ``expected_init_loss=`` is what the project expects of the first loss that it backpropagates; half as much again,
    or as little, is a fault.
    Of triplets, margins between distances, likelihoods with a variance and losses written by hand chance is not known.

Faulty
    >>> for p in model.head.parameters():
    ...     torch.nn.init.normal_(p, std=20.0)

Fixed
    >>> for p in model.head.parameters():
    ...     torch.nn.init.normal_(p, std=0.02)

Known limits
    Only loss functions of ``torch.nn.functional`` (and the modules that call them) are seen.

References
    https://karpathy.github.io/2019/04/25/recipe/
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLoss
    from pytest_trainloop.runs.evidence import Evidence

FAULT, ADVICE = 10.0, 3.0
"""Times chance from which a loss is a fault, and advice."""

UNIT = 1.0
"""Root mean square of outputs that usual initialisations stay at or below for inputs of unit size."""

FALLS = 2 / 3
"""Share of the outputs' size that may be left once weights are halved: half of it, or less, where these make it."""

BELOW = 5.0
"""Standard errors below the entropy of the labels."""

DECLARED = 1.5
"""Factor from a declared initial loss."""

CONSEQUENCES = ("update_ratio",)

CAUSES = {
    "too_high": "ten times what an input that knows nothing gives, by outputs that shrink as the weights are halved",
    "not_as_declared": "the first loss that is backpropagated is not what expected_init_loss says",
    "inputs_too_large": "the loss is three times chance or more, and not once the inputs are brought to unit size",
    "above_chance": "more than what an input that knows nothing gives, or so by a scale that no weight sets",
    "below_chance": "under five seeds the loss is five standard errors below the entropy of the labels at the start",
}


@check(needs={"run"}, causes=CAUSES, rank=20)
def loss_at_init(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns

    expected = evidence.declared("expected_init_loss")
    if expected is not None:
        yield from _declared(evidence, expected)
        return
    seen = evidence.shared(InitialRuns).losses()
    known = [loss for loss in seen if math.isfinite(loss.times)]
    if not known:
        names = ", ".join(dict.fromkeys(loss.name for loss in seen))
        raise CannotDecide(
            f"what chance gives is not known of {names}"
            if names
            else "no loss function of torch is called before the first step; say what is expected with "
            "expected_init_loss="
        )
    high = [loss for loss in known if loss.times > ADVICE]
    for worst in sorted(high, key=lambda loss: -loss.times):
        halved = next((h for h in evidence.shared(InitialRuns).losses(0.5) if h.where == worst.where), None)
        if halved is None or abs(halved.chance - worst.chance) > 1e-3 * worst.chance:
            continue  # its targets are made by weights, and say nothing of chance
        yield _why(evidence, worst, halved)
        break
    lowest = max(known, key=lambda loss: loss.below)
    if lowest.below > BELOW and _below_under_other_seeds(evidence, lowest):
        yield _below(lowest)


def _why(evidence: Evidence, worst: InitialLoss, halved: InitialLoss) -> Finding:
    """What makes the loss so high: the inputs, the weights, or neither."""
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns
    from pytest_trainloop.runs.weight_origins import pretrained

    unit, size = evidence.shared(InitialRuns).losses_of_unit_inputs()
    usual = next((u for u in unit if u.where == worst.where), None)
    if usual is not None and usual.times <= ADVICE:
        return _by_inputs(worst, usual, size)
    tables = next((t for t in evidence.shared(InitialRuns).losses(0.5, "embeddings") if t.where == worst.where), None)
    by_weights = worst.times > FAULT and worst.outputs > UNIT and halved.outputs <= FALLS * worst.outputs
    by_tables = tables is not None and tables.outputs <= FALLS * worst.outputs
    drawn = by_weights and not by_tables and not evidence.shared(pretrained)
    return (_too_high if drawn else _above)(worst, halved.value)


def _by_inputs(loss: InitialLoss, usual: InitialLoss, size: float) -> Finding:
    return Finding(
        cause="inputs_too_large",
        level="advice",
        summary=(
            f"{loss.name} is {loss.value / loss.chance:.1f} times what chance gives before the first step, since the "
            f"inputs are of size {size:.3g}"
        ),
        measured=_measured(loss),
        shown_by=f"with inputs divided by their root mean square it is {usual.value:.4g}",
        culprits=(loss.name,),
        where=loss.where,
        repair="bring the inputs to unit variance (images to [0, 1], columns by mean and spread), or put a norm first",
    )


def _below_under_other_seeds(evidence: Evidence, lowest: InitialLoss) -> bool:
    """Whether other random weights give it too: rows of one class that look alike do so by luck, one time in two.
    Weights that are the same under another seed are trained ones."""
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns

    others = [
        loss
        for s in range(1, 5)
        for loss in evidence.shared(InitialRuns).losses(other_seed=s)
        if loss.where == lowest.where
    ]
    return all(loss.below > BELOW and loss.value != lowest.value for loss in others)


def _declared(evidence: Evidence, expected: float) -> Iterator[Finding]:
    backwards = [b for b in evidence.run().backwards() if b.roots]
    if not backwards:
        raise CannotDecide("nothing is backpropagated; the first loss is not known")
    first = backwards[0]
    value = sum(root.value for root in first.roots)
    if not expected / DECLARED <= value <= expected * DECLARED:
        yield Finding(
            cause="not_as_declared",
            summary=f"the first loss is {value:.4g}, and expected_init_loss says {expected:.4g}",
            measured=f"{value / expected:.2f} times what is declared" if expected else f"{value:.4g}",
            shown_by="the first value that is backpropagated, before any step",
            culprits=("expected_init_loss",),
            where=str(first.place),
            repair="look at the initialisation and at the inputs' scale; or mend what is declared",
            explains=CONSEQUENCES,
        )


def _measured(loss: InitialLoss) -> str:
    return f"{loss.value:.4g}, by chance {loss.chance:.4g}; outputs of root mean square {loss.outputs:.3g}"


def _too_high(loss: InitialLoss, left: float) -> Finding:
    return Finding(
        cause="too_high",
        summary=f"{loss.name} is {loss.value / loss.chance:.0f} times what chance gives before the first step",
        measured=_measured(loss),
        shown_by=f"with all layers' weights halved it is {left:.4g}: their size makes it, not a fixed scale",
        culprits=(loss.name,),
        where=loss.where,
        repair=(
            "initialise the last layer smaller (std 0.02, or zero), put a norm before the head, divide by the "
            "temperature once"
        ),
        explains=CONSEQUENCES,
    )


def _above(loss: InitialLoss, left: float) -> Finding:
    return Finding(
        cause="above_chance",
        level="advice",
        summary=f"{loss.name} is {loss.value / loss.chance:.1f} times what chance gives before the first step",
        measured=_measured(loss),
        shown_by=f"with all weights halved it is {left:.4g}",
        culprits=(loss.name,),
        where=loss.where,
        repair=(
            "nothing, if a scale or a margin is meant; else a smaller initialisation of the last layer"
            if loss.outputs > UNIT
            else "bring the targets to unit variance, or initialise the last layer smaller"
        ),
    )


def _below(loss: InitialLoss) -> Finding:
    return Finding(
        cause="below_chance",
        level="advice",
        summary=f"{loss.name} is {loss.value:.4g} before the first step, below the entropy of its labels",
        measured=f"entropy {loss.entropy:.4g}; {loss.below:.0f} standard errors above the loss",
        shown_by="no step was made yet, and other random weights under four more seeds give it too",
        culprits=(loss.name,),
        where=loss.where,
        repair="nothing for pretrained weights or a copying task; else look whether the labels stand in the input",
    )
