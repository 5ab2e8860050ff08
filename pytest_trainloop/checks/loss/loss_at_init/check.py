"""Before the first step the loss is at chance level.

What it does
    It records every call of a loss function of torch before the first optimizer step, and makes the same call with
    an uninformed input: equal scores for all classes, even odds, zero or the mean of the targets. The loss of that
    input is chance level.

Why is this bad?
    A net that begins far above chance is confident of wrong answers. The first thousand steps undo the effect of the
    initialisation, of the scale of the inputs or of a temperature; some units are dead by then, and a learning rate low
    enough to survive them is too low for the rest.

How it decides
    Chance comes from the call itself, so weights, smoothing, ignored labels, the number of negatives and the reduction
    are the same in both calls. More than 10 times chance (10 times its root for squared errors) is a fault where it
    comes from randomly initialised weights: the input of the loss must shrink by at least a third when the weights of
    all layers are halved. Where it does not (a cosine with a fixed scale, a margin, a learned temperature) it is by
    design, and advice. So is more than 3 times chance, and a high loss from pretrained weights, from torch's own tables
    of embeddings (tied to the output, they have unit variance), or from inputs that are not of unit size. So are
    outputs of at most unit size, as the usual initialisations (Glorot, He) give them: then not the weights are large,
    but the targets are small. Targets that change with the weights (a target net, a codebook) are not judged. A loss
    far below the entropy of the labels, by 5 standard errors of their mean and under five seeds, is advice: the input
    may contain the labels.
    ``expected_init_loss=`` is what the project expects of the first loss that it backpropagates, with or without its
    constant factors (a loss scale, the number of micro-batches); half as much again, or as little, is a fault. Where 0
    is expected, the mean over eight seeds is compared with it: ten standard errors, beside 1e3 eps of float32 for
    rounding, are a fault.
    A last layer's bias of one number, whose sign turned brings a binary loss below that of even odds, while as it is it
    costs twice that or more, is a prior without its minus: a fault.
    Of losses written by hand, chance is what the same calls give for zeros in place of the last layers' outputs. They
    are at fault above ten times that (its root for losses that grow with the square) where weights are drawn wider than
    any usual initialisation, and the loss comes down to three times once they have torch's own width.

Faulty
    >>> for p in model.head.parameters():
    ...     torch.nn.init.normal_(p, std=20.0)

Fixed
    >>> for p in model.head.parameters():
    ...     torch.nn.init.normal_(p, std=0.02)

Known limits
    Beside loss functions of ``torch.nn.functional`` (and the modules that call them), losses written by hand are judged
    only where the loop calls no function of torch whose chance level is known.

References
    https://karpathy.github.io/2019/04/25/recipe/
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLoss
    from pytest_trainloop.runs.evidence import Evidence

FAULT, ADVICE = 10.0, 3.0
"""Times chance from which a loss is a fault, and advice."""

UNIT = 1.0
"""Root mean square that outputs do not exceed with usual initialisations, for inputs of unit size."""

REMAINS = 2 / 3
"""Share of the outputs' size that may remain when weights are halved: half or less, where the weights cause it."""

BELOW = 5.0
"""Standard errors below the entropy of the labels."""

DECLARED = 1.5
"""Factor from a declared initial loss."""

CAUSES = {
    "too_high": Cause(
        proof="ten times the loss of an uninformed input, and the outputs shrink when the weights are halved",
        repair="look for a factor on the outputs (a temperature that is applied twice), or a stack of layers without a "
        "norm; else initialise the last layer smaller (std 0.02)",
        explains=("update_ratio",),
    ),
    "not_as_declared": Cause(
        proof="the first loss that is backpropagated is not what expected_init_loss says",
        repair="look at the initialisation and at the scale of the inputs; or correct what is declared",
        explains=("update_ratio",),
    ),
    "inputs_too_large": Cause(
        proof="the loss is three times chance or more, and not with inputs scaled to unit size",
        repair="bring the inputs to unit variance (images to [0, 1], columns by mean and spread), or put a norm first",
        settle="expected_init_loss= says what the first loss must be, and is judged in place of chance",
    ),
    "prior_inverted": Cause(
        proof="the last layer's bias is one number; a binary loss begins at twice that of even odds or more, and with "
        "the other sign of that number below it",
        repair="fill the bias with -log((1 - p) / p), which is log(p / (1 - p))",
        explains=("update_ratio",),
    ),
    "above_chance": Cause(
        proof="the loss is above that of an uninformed input, or far above it by a scale that no weight sets",
        repair="a smaller initialisation of the last layer",
        settle="expected_init_loss= says what the first loss must be, and is judged in place of chance",
    ),
    "below_chance": Cause(
        proof="under five seeds the loss is five standard errors below the entropy of the labels at the start",
        repair="look whether the input contains the labels; pretrained weights and copying tasks may start below",
        settle="expected_init_loss= says what the first loss must be, and is judged in place of chance",
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=20, steps=5)
def loss_at_init(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns

    expected = evidence.declared("expected_init_loss")
    if expected is not None:
        yield from _declared(evidence, expected)
        return
    inverted = _inverted(evidence)
    if inverted is not None:
        yield inverted
        return
    losses = evidence.shared(InitialRuns).losses()
    known = [loss for loss in losses if math.isfinite(loss.times)]
    if not known:
        written = _written(evidence)
        if written is not None:
            yield from written
            return
        names = ", ".join(dict.fromkeys(loss.name for loss in losses))
        raise CannotDecide(
            f"chance level is not known for {names}"
            if names
            else "no loss function of torch is called before the first step; say what is expected with "
            "expected_init_loss="
        )
    high = [loss for loss in known if loss.times > ADVICE]
    for worst in sorted(high, key=lambda loss: -loss.times):
        halved = _same_call(evidence.shared(InitialRuns).losses(0.5), worst)
        if halved is None or abs(halved.chance - worst.chance) > 1e-3 * worst.chance:
            continue  # its targets depend on the weights, and chance with them
        yield _high(evidence, worst, halved)
        break
    lowest = max(known, key=lambda loss: loss.below)
    if lowest.below > BELOW and _below_under_other_seeds(evidence, lowest):
        yield Finding(
            cause="below_chance",
            level="advice",
            summary=f"{lowest.name} is {lowest.value:.4g} before the first step, below the entropy of its labels",
            measured=f"loss {lowest.value:.4g}, entropy {lowest.entropy:.4g}: {lowest.below:.0f} standard errors apart",
            shown_by="no step was made yet, and other random weights under four more seeds give it too",
            culprits=(lowest.name,),
            where=lowest.where,
        )


def _inverted(evidence: Evidence) -> Finding | None:
    """A prior whose sign is turned; pretrained weights have learned theirs."""
    from pytest_trainloop.checks.loss.loss_at_init.inverted_prior import inverted_prior
    from pytest_trainloop.runs.weight_origins import pretrained
    from pytest_trainloop.tracing.made_at import MadeAt

    found = evidence.shared(inverted_prior)
    if found is None or evidence.shared(pretrained):
        return None
    return Finding(
        cause="prior_inverted",
        summary=f"{found.bias} is filled with {found.filled:.4g}, and lacks a minus: the rare class begins as the "
        "likely one",
        measured=f"loss {found.loss:.4g} before the first step; {found.even:.4g} for even odds, {found.turned:.4g} "
        f"with {-found.filled:.4g} as the bias",
        shown_by="the same outputs with the bias' sign turned, in float64",
        culprits=(found.bias,),
        where=found.where,
        change=str(evidence.shared(MadeAt.of).drawn(found.bias) or ""),
        repair=f"fill {found.bias} with {-found.filled:.4g}: log(p / (1 - p)) for a share p of positives",
    )


def _same_call(losses: Iterable[InitialLoss], loss: InitialLoss) -> InitialLoss | None:
    """The call from the same line in another run."""
    return next((other for other in losses if other.where == loss.where), None)


def _high(evidence: Evidence, loss: InitialLoss, halved: InitialLoss) -> Finding:
    """Whether the inputs, the weights, or neither make the loss high."""
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns
    from pytest_trainloop.runs.weight_origins import pretrained

    finding = Finding(
        cause="above_chance",
        level="advice",
        summary=f"{loss.name} is {loss.value / loss.chance:.1f} times chance level before the first step",
        measured=f"{loss.value:.4g}, at chance level {loss.chance:.4g}; outputs of root mean square {loss.outputs:.3g}",
        shown_by=f"with all weights halved it is {halved.value:.4g}",
        culprits=(loss.name,),
        where=loss.where,
        repair="" if loss.outputs > UNIT else "scale the targets to unit variance, or make the last layer smaller",
    )
    runs = evidence.shared(InitialRuns)
    unit, size = runs.losses_of_unit_inputs()
    with_unit_inputs = _same_call(unit, loss)
    if with_unit_inputs is not None and with_unit_inputs.times <= ADVICE:
        return replace(
            finding,
            cause="inputs_too_large",
            summary=f"{finding.summary}, since the inputs are of size {size:.3g}",
            shown_by=f"with inputs divided by their root mean square it is {with_unit_inputs.value:.4g}",
            repair="",
        )
    tables = _same_call(runs.losses(0.5, "embeddings"), loss)
    by_weights = loss.times > FAULT and loss.outputs > UNIT and halved.outputs <= REMAINS * loss.outputs
    by_tables = tables is not None and tables.outputs <= REMAINS * loss.outputs
    if not by_weights or by_tables or evidence.shared(pretrained):
        return finding
    return _with_layer(
        evidence,
        loss,
        replace(
            finding,
            cause="too_high",
            level="fault",
            summary=f"{loss.name} is {loss.value / loss.chance:.0f} times chance level before the first step",
            shown_by=f"with all layers' weights halved it is {halved.value:.4g}: their size is the cause",
        ),
    )


def _with_layer(evidence: Evidence, loss: InitialLoss, finding: Finding) -> Finding:
    """With the weights that are drawn too wide, where these make the loss so high, and the line that draws them."""
    from pytest_trainloop.checks.loss.loss_at_init.wide_weights import WideWeights
    from pytest_trainloop.tracing.made_at import MadeAt

    found = evidence.shared(WideWeights).causing(loss, ADVICE)
    if found is None:
        return replace(finding, shown_by=f"{finding.shown_by}; none that is drawn too wide explains it")
    wide, narrow = found
    first, names = wide[0], tuple(w.name for w in wide)
    made = evidence.shared(MadeAt.of)
    line = made.drawn(first.name) or made.module(first.name.rpartition(".")[0])
    return replace(
        finding,
        summary=f"{finding.summary}: {some(names)} {be(names)} drawn too wide",
        shown_by=f"with {first.name} at a standard deviation of {first.usual:.2g} in place of {first.std:.2g}"
        + (f", and {len(wide) - 1} more at their usual one," if len(wide) > 1 else "")
        + f" it is {narrow.value:.4g}",
        culprits=(loss.name, *names),
        change=line,
        repair=f"initialise {first.name} with std={first.usual:.2g}, that of torch's own layers"
        + (f"; and {some(names[1:])} likewise" if len(wide) > 1 else ""),
        tried=f"with this change the loss is {narrow.value:.4g}, at chance level {narrow.chance:.4g}",
    )


def _written(evidence: Evidence) -> list[Finding] | None:
    """What is said of losses that are written by hand; None where their chance level is not known."""
    from pytest_trainloop.checks.loss.loss_at_init.wide_weights import WideWeights
    from pytest_trainloop.checks.loss.loss_at_init.written_losses import written_losses
    from pytest_trainloop.runs.weight_origins import pretrained

    if not evidence.repeatable:
        return None
    known = [loss for loss in evidence.shared(written_losses) if math.isfinite(loss.times)]
    if not known:
        return None
    loss = max(known, key=lambda one: one.times)
    if loss.times <= FAULT or loss.outputs <= UNIT or evidence.shared(pretrained):
        return []
    found = WideWeights(evidence).causing(loss, ADVICE, lambda prepare: written_losses(evidence, prepare))
    if found is None:
        return []
    wide, narrow = found
    names = tuple(w.name for w in wide)
    return [
        Finding(
            cause="too_high",
            summary=f"the loss is {loss.value / loss.chance:.0f} times what it is for outputs of 0, before the first "
            f"step: {some(names)} {be(names)} drawn too wide",
            measured=f"{loss.value:.4g}, and {loss.chance:.4g} with zeros as the last layers' outputs, which have a "
            f"root mean square of {loss.outputs:.3g}",
            shown_by=f"with {names[0]} at a standard deviation of {wide[0].usual:.2g} in place of {wide[0].std:.2g}"
            + (f", and {len(wide) - 1} more at their usual one," if len(wide) > 1 else "")
            + f" it is {narrow.value:.4g}",
            culprits=("the loss", *names),
            where=loss.where,
            repair=f"initialise {names[0]} with std={wide[0].usual:.2g}, that of torch's own layers",
        )
    ]


def _below_under_other_seeds(evidence: Evidence, lowest: InitialLoss) -> bool:
    """Whether other random weights give it too: rows of one class that are similar do so by chance, one time in two.

    Weights that are the same under another seed are pretrained.
    """
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns

    runs = evidence.shared(InitialRuns)
    others = [loss for s in range(1, 5) for loss in runs.losses(other_seed=s) if loss.where == lowest.where]
    return all(loss.below > BELOW and loss.value != lowest.value for loss in others)


def _declared(evidence: Evidence, expected: float) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_at_init.first_loss import FirstLosses

    backwards = [b for b in evidence.run().backwards() if b.roots]
    if not backwards:
        raise CannotDecide("nothing is backpropagated; the first loss is not known")
    first = backwards[0]
    value = given = sum(root.value for root in first.roots)
    if _as_declared(value, expected):
        return
    found = evidence.shared(FirstLosses).under()
    if found is not None:
        if any(_as_declared(v, expected) for v in found.values):
            return
        value = found.plain
    over = evidence.shared(FirstLosses).over_seeds() if not expected else None
    if over is not None and over.is_zero:
        return
    if over is not None:
        measured = f"under eight seeds {over.mean:.4g} in the mean, with a standard error of {over.error:.2g}"
    else:
        measured = f"{value / expected:.2f} times what is declared" if expected else f"{value:.4g}"
    scaled = f" (before a factor of {given / value:g})" if value and value != given else ""
    yield Finding(
        cause="not_as_declared",
        summary=f"the first loss is {value:.4g}{scaled}, and expected_init_loss says {expected:.4g}",
        measured=measured,
        shown_by="the first value that is backpropagated",
        culprits=("expected_init_loss",),
        where=str(first.place),
    )


def _as_declared(value: float, expected: float) -> bool:
    """Whether it is of the same sign, and at most half as much again or as little."""
    return value == expected or (value * expected > 0 and 1 / DECLARED <= value / expected <= DECLARED)
