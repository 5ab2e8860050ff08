"""Before the first step the loss is at chance level.

What it does
    It records every call of a loss function of torch before the first optimizer step. It makes the same call with an
    uninformed input: equal scores for all classes, even odds, zero or the mean of the targets. The loss of that input
    is chance level.

Why is this bad?
    A net that begins far above chance is confident of wrong answers. The first thousand steps undo the effect of the
    initialisation, of the scale of the inputs or of a temperature; some units are dead by then, and a learning rate low
    enough to survive them is too low for the rest.

How it decides
    1. Chance comes from the same call with an uninformed input. So weights, smoothing, ignored labels and the reduction
       are equal in both calls.
    2. Squared errors use the root of the factors in the table. Targets that change with the weights (a target net, a
       codebook) are not judged.
    3. ``expected_init_loss=`` replaces this. The first loss may have constant factors (a loss scale, the number of
       micro-batches). Half as much again, or as little, is a fault.
    4. Where 0 is expected, the mean over eight seeds must lie within ten standard errors, plus 1e3 eps of float32.
    5. Losses written by hand are compared with the same calls on zeros. A fault needs ten times that, weights wider
       than any usual initialisation, and three times or less with torch's own width.

    | first that holds | cause | advice if |
    |---|---|---|
    | the first loss is not as declared | ``not_as_declared`` |  |
    | the bias's sign turned beats even odds; now it costs twice that | ``prior_inverted`` |  |
    | over 3 times chance, and not with inputs of unit size | ``inputs_too_large`` | always |
    | over 10 times chance; halved weights shrink the loss's input by a third | ``too_high`` | the next row holds |
    | pretrained, torch's tables, outputs of unit size, or a fixed scale | ``above_chance`` | always |
    | over 3 times chance | ``above_chance`` | always |
    | 5 standard errors below the entropy of labels, under five seeds | ``below_chance`` | always |

When it is skipped
    It skips a loop without a loss whose chance level is known: declare ``expected_init_loss=``.

Faulty
    >>> for p in model.head.parameters():
    ...     torch.nn.init.normal_(p, std=20.0)

Fixed
    >>> for p in model.head.parameters():
    ...     torch.nn.init.normal_(p, std=0.02)

Known limits
    Loss functions of ``torch.nn.functional`` are judged, also where a module calls them. Losses written by hand are
    judged only where the loop calls no function of torch whose chance level is known.

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
