"""Every term that is added to the loss trains something, and every term that is computed is added.

What it does
    It splits what the loop backpropagates into the terms that it is the sum of, whoever computed them, and looks
    for terms without a gradient. It also follows single numbers that were computed with a gradient and that no backward
    pass goes through.

Why is this bad?
    The value of such a term appears in the log and may even fall, because the weights move for other reasons. The
    penalty, the auxiliary loss or the constraint that it represents is missing.

How it decides
    What is added without a history adds a constant: it trains nothing, whatever it is. Such a constant is a fault where
    it moves with the weights that the loss trains: the first loss is computed again with these weights moved, the batch
    and the draws the same, and no step taken. Silent are constants of the data or of another net (the real half of a
    GAN's value), a value that is added in place of another's (x + (y - x).detach()), one that is trained by another
    backward pass, and one of which a factor of the trained terms is made (responsibilities of a mixture, the choice of
    examples in self-paced learning): such terms are at their optimum by another rule.
    A term whose gradient goes only to weights that no step changes by it is a fault too, where it was cut off from the
    weights that its backward pass does train: a detached picture in the discriminator, in the generator's step. Silent
    are the real half of a critic's value, an optimizer that may step later, and weights that the loop moves by hand.
    A term that compares two results of weights that nothing trains is a constant for ever: a fault where both sides
    come from the same weights (a teacher with itself), else advice.
    A number that was computed with a gradient and is in no loss of the run is a fault where a parameter that an
    optimizer holds gets its gradient from nowhere else, and where the source shows that nothing can read a value of
    that name. Read elsewhere it may be a measure: advice, for names of a loss or a penalty. Of the values that one name
    takes in a loop, only the last may be backpropagated: a fault where the earlier ones were computed of other data.
    A difference whose two sides are made by the same calls of the same tensors is 0 for every batch and all weights.
    That is a fault where the loss would be another with another difference, at every turn of the line. Silent is one
    that trains by its slope, since one side of it is detached (x + (y - y.detach()), a ratio of probabilities that is
    1), and x - x in one line, which is a way to write 0. Values that are equal by their numbers alone, as two nets at
    the start, are not one value.
    An extreme that is taken of masked entries and gives the value of the mask in every row, where a hinge then cuts all
    of it, is a fault: each row had entries of a finite size, which are never chosen.
    A dict of terms and a dict of weights that have keys in common, where a term without a weight and a weight without a
    term are of one thing, is a spelling.

Faulty
    >>> for x, y in batches:
    ...     scores = model(x)
    ...     penalty = scores.square().mean().item()
    ...     loss = torch.nn.functional.cross_entropy(scores, y) + 0.1 * penalty
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()

Fixed
    >>> for x, y in batches:
    ...     scores = model(x)
    ...     penalty = scores.square().mean()
    ...     loss = torch.nn.functional.cross_entropy(scores, y) + 0.1 * penalty
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()

Known limits
    The results of layers are each taken for a value of their own: a model called twice on the same rows is not seen to
    be compared with itself. Penalties made of parameters alone are not looked into.
    Terms inside compiled kernels and custom autograd functions are not split, and what is added within a product
    or a root is no term.

References
    https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html
    https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.every_term_trains.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(
    needs={"fit"},
    causes=CAUSES,
    rank=15,
    steps=5,
    instrument="pytest_trainloop.checks.loss.every_term_trains.survey:SurveyInRun",
    names="term",
)
def every_term_trains(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.every_term_trains import constants, lost_terms, of_the_tape
    from pytest_trainloop.checks.loss.every_term_trains.survey import Survey

    survey = evidence.shared(Survey.of)
    added = [*constants.constant_terms(evidence, survey), *constants.derivatives_beside(survey)]
    added += constants.cut_terms(evidence, survey)
    yield from added
    for lost in lost_terms.lost_terms(evidence, survey):
        # a term that is added by its value alone is lost by that
        if lost.level == "fault" or not any(f.where == lost.where or f.culprits == lost.culprits for f in added):
            yield lost
    yield from of_the_tape.same_sides(evidence)
    yield from of_the_tape.chosen_fills(evidence)
