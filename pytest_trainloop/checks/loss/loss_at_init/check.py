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
    is expected, the mean over eight seeds is compared with it: ten standard errors, plus 1e3 eps of float32 for
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
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_at_init.causes import CAUSES, found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

BELOW = 5.0
"""Standard errors below the entropy of the labels."""


@check(needs={"run"}, causes=CAUSES, rank=20, steps=5)
def loss_at_init(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_at_init import first_loss, high
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns
    from pytest_trainloop.checks.loss.loss_at_init.inverted_prior import inverted_prior

    if (expected := evidence.declared("expected_init_loss")) is not None:
        yield from first_loss.not_as_declared(evidence, expected)
        return
    if (inverted := evidence.shared(inverted_prior)) is not None:
        yield inverted
        return
    losses = evidence.shared(InitialRuns).losses()
    known = [loss for loss in losses if math.isfinite(loss.times)]
    if known:
        yield from high.called(evidence, known)
        yield from _below(evidence)
    elif (written := high.written(evidence)) is not None:
        yield from written
    elif names := ", ".join(dict.fromkeys(loss.name for loss in losses)):
        raise CannotDecide(f"chance level is not known for {names}")
    else:
        raise CannotDecide(
            "no loss function of torch is called before the first step; say what is expected with expected_init_loss="
        )


def _below(evidence: Evidence) -> Iterator[Finding]:
    """A loss below the entropy of its labels. Rows of one class that are similar give it by chance, one time in two, so
    other random weights must give it too; weights that are the same under another seed are pretrained."""
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialRuns

    runs = evidence.shared(InitialRuns)
    lowest = max((loss for loss in runs.losses() if math.isfinite(loss.times)), key=lambda loss: loss.below)
    if lowest.below <= BELOW:
        return
    others = [loss for s in range(1, 5) for loss in runs.losses(other_seed=s) if loss.where == lowest.where]
    if all(loss.below > BELOW and loss.value != lowest.value for loss in others):
        facts = {"value": lowest.value, "entropy": lowest.entropy, "errors": lowest.below, "level": "advice"}
        yield found("below_chance", lowest.where, (lowest.name,), **facts)
