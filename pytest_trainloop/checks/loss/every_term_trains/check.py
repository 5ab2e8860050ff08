"""Every term that is added to the loss trains something, and every term that is computed is added.

What it does
    It splits what the loop backpropagates into the terms that it is the sum of, whoever computed them, and looks
    for terms without a gradient. It also follows single numbers that were computed with a gradient and that no backward
    pass goes through.

Why is this bad?
    The value of such a term appears in the log and may even fall, because the weights move for other reasons. The
    penalty, the auxiliary loss or the constraint that it represents is missing.

How it decides
    1. It splits each loss into a sum of terms. Terms without a history are constants and train nothing
       (docs/how-it-decides.md#terms-that-train-nothing).
    2. It computes the first loss again with the trained weights moved, the batch and draws the same, and no step taken.
       A constant that moves is a fault. If a watched run cannot be repeated it is advice.
    3. Silent are constants of the data or of another net (the real half of a GAN's value), and a value added in place
       of another's. Silent are also terms that another backward pass trains, and factors of trained terms
       (responsibilities of a mixture).
    4. A term whose gradient goes only to weights that no step changes by it is a fault, if it was cut off from weights
       that its backward pass trains. Silent: an optimizer that may step later, and weights that the loop moves.
    5. A number with a gradient that no backward pass reached is judged over the whole run.
    6. A term goes into an ``autograd.Function``, and the source throws its result away. A backward pass from that
       result is made once: it is a fault if it gives the term a gradient, and no backward pass of the run does.
    7. Sides are equal if the same calls made them of the same tensors. Equal numbers alone prove nothing. Silent:
       ``x - x`` in one line, and sides of which one is detached and that train by their slope.

    | seen | cause | advice if |
    |---|---|---|
    | a constant, or a cut-off term, as in items 2 and 4 | ``term_detached`` | not repeatable |
    | a derivative without a graph is added and moves | ``penalty_off_graph`` | not repeatable |
    | a derivative without a graph is added entry by entry | ``derivative_off_graph`` | always |
    | a term compares results of weights that nothing trains | ``term_between_frozen`` | two nets |
    | a lost number alone trains a parameter; nothing reads its name; item 6 | ``term_left_out`` | read elsewhere |
    | of one name's values in a loop only the last counts; others had other data | ``term_overwritten`` |  |
    | a difference is always 0, at every turn of the line, and should count | ``compared_with_itself`` |  |
    | the extreme of masked entries is the mask's value in every row | ``fill_chosen`` |  |
    | a term without a weight and a weight without a term name one thing | ``weight_of_another_name`` |  |

When it is skipped
    It skips a loop that backpropagates no single number.

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
    be compared with itself. Penalties made of parameters alone are not looked into. Terms inside compiled kernels and
    custom autograd functions are not split, and what is added within a product or a root is no term.

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
    added = [*constants.constant_terms(evidence, survey), *constants.detached_derivatives(survey)]
    added += constants.cut_terms(evidence, survey)
    yield from added
    for lost in lost_terms.lost_terms(evidence, survey):
        # a term that is added by its value alone is lost by that
        if lost.level == "fault" or not any(f.where == lost.where or f.culprits == lost.culprits for f in added):
            yield lost
    yield from of_the_tape.same_sides(evidence)
    yield from of_the_tape.chosen_fills(evidence)
