"""Losses written by hand compute the textbook form that they resemble.

What it does
    It notes every call of torch between the outputs of the last layers, the batch and what is backpropagated, in the
    first two steps in float64, and seeks textbook forms among the values: Dice, Jaccard, Tversky, focal, cross
    entropies, hinge, IoU of boxes, likelihoods, divergences, contrastive, ranking, survival and policy losses,
    ratios of signal to distortion.

Why is this bad?
    A Dice loss of raw scores, a hinge on labels of 0 and 1, an overlap that is minimised: each runs, and most fall. No
    shape or type is wrong; only the formula is.

How it decides
    By what is computed, never by names. A form agrees with a value where both are the same function: values at 14
    settings of the arguments (those of the run and others drawn in the same range, through the loop's own calls made
    again) and gradients, to half of the digits of float64. Nothing else that is learned or data may reach the value.
    Constants (smoothing, weights, a margin) are found by least squares, with more equations than constants.
    Where a clamp keeps a divisor above 0, an overlap of masks has to agree for predictions in [0, 1] only.
    A right form that agrees is silent, unless what it is given is not what it takes: the output of a layer, below 0
    or above 1, for probabilities; 0 and 1 for -1 and 1; boxes that are none when read by their corners. A form with
    one wrong ingredient counts only where no right form agrees with the same value. A sign is read from the gradient of
    what is backpropagated with respect to the value, where nothing else trains these outputs, the target varies and
    comes from the batch, an optimizer holds the layer and none maximises: games and attacks make a loss worse on
    purpose. No agreement, or too many forms to try: nothing is said.
    A form that is recognised is no fault yet. The outputs of the layers take 40 gradient steps along all that the loop
    backpropagates in the step, in float64, from three starts. It is a fault where the quantity that the form is for
    (the overlap, the likelihood of the targets, the KL divergence, the return of the policy) gets worse, gets no
    better where the textbook's form improves it, runs away, or leaves its best value, at every start. Where the loss
    gets it right all the same, nothing is said; where only a constant is another one, or nothing can be tried, it is
    advice. A prediction that targets go into is an error, and a distance is no score: they are not judged.
    Comparisons of outputs with the batch, entry by entry, are looked at whatever is made of them, and tried the same
    way. Entries are misaligned where both sides are reshaped or transposed copies of tensors with the same axes, and
    along an axis whose length no other has they lie in another order. Errors cancel where any errors of mean 0 may be
    added to the differences and the loss stays the same. A distance is made larger where the loss falls as each
    difference grows, above 0 and below. The last two count only where nothing else trains these outputs.
    Labels meet scores of other positions where scores have one axis more than labels, and after a reshape, whichever
    axis holds the classes, some label meets another position's scores. A label says nothing where label * a and
    (1 - label) * b are added, a equals b at random outputs and batches, and the sum stays with all labels turned. One
    permutation is chosen for all rows where a minimum is over means over rows of one cost with the outputs permuted,
    and a row alone chooses another: a fault where a shuffling loader stacks the rows, or rows_interact=False is
    declared.

Faulty
    >>> head = nn.Linear(8, 1)
    >>> optimizer = torch.optim.Adam(head.parameters())
    >>> for x, y in batches:
    ...     p, t = head(x).flatten(), (y > 0).double()
    ...     optimizer.zero_grad()
    ...     (1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)).backward()
    ...     optimizer.step()

Fixed
    >>> head = nn.Linear(8, 1)
    >>> optimizer = torch.optim.Adam(head.parameters())
    >>> for x, y in batches:
    ...     p, t = head(x).sigmoid().flatten(), (y > 0).double()
    ...     optimizer.zero_grad()
    ...     (1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)).backward()
    ...     optimizer.step()

Known limits
    What passes numpy, custom autograd functions or compiled kernels is not followed. A loss of very many entries is
    not looked at: a smaller batch shows the same. Forms with two mistakes agree with none.

References
    https://arxiv.org/abs/1606.04797
    https://arxiv.org/abs/1708.02002
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_formula.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=12, instrument="pytest_trainloop.instruments.tracing.loss_tape:Tapes")
def loss_formula(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_formula.forms import judged

    yield from judged(evidence)
