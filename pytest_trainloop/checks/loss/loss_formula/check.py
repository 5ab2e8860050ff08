"""Losses written by hand compute the textbook form that they resemble.

What it does
    It notes every call of torch between the outputs of the last layers, the batch and what is backpropagated, in the
    first two steps in float64. It seeks textbook forms among the values: Dice, Jaccard, Tversky, focal, cross
    entropies, hinge, IoU of boxes, likelihoods and divergences. Also contrastive, ranking, survival and policy losses,
    and ratios of signal to distortion.

Why is this bad?
    A Dice loss of raw scores, a hinge on labels of 0 and 1, an overlap that is minimised: each runs, and most fall. No
    shape or type is wrong; only the formula is.

How it decides
    1. A form agrees with a value if both are the same function: values and gradients at 14 settings of the arguments
       agree to half of float64's digits. Constants are fitted, by more equations than constants.
    2. Nothing else that is learned or data may reach the value. With a clamp on a divisor, an overlap of masks must
       agree for predictions in [0, 1] only.
    3. A right form that agrees is silent, unless its arguments are not what it takes. A form with one wrong ingredient
       counts only if no right form agrees.
    4. A sign is read from the gradient of what is backpropagated. Nothing else may train these outputs, the target
       varies and comes from the batch, and no optimizer maximises.
    5. Then an experiment decides (docs/how-it-decides.md#losses-written-by-hand): the outputs take 40 steps along
       what the loop backpropagates, in float64, from three starts.
    6. It is a fault if the form's quantity gets worse at every start, stays where the textbook form improves it, runs
       away, or leaves its best value. Boxes are also tried by their term alone.
    7. It is advice if only a constant differs, nothing can be tried, or pretrained weights get a wrong sign.
    8. Values without a wrong form are compared entry by entry with the batch.
    9. Two terms that compare the same outputs with the same targets are both trained, alone and together
       (docs/how-it-decides.md#terms-that-disagree). It is a fault if one change before one term lets them agree, and
       advice if that term is a plain distance to labels.

    | seen | cause |
    |---|---|
    | the form takes probabilities, and gets layer outputs below 0 or above 1 | ``scores_as_probabilities`` |
    | it takes scores, and gets the result of a sigmoid or softmax | ``probabilities_as_scores`` |
    | it takes -1 and 1, and gets 0 and 1; it reads corners, and gets no boxes | ``labels_as_signs``, ``box_format`` |
    | only a form with one mistake agrees: a factor, term or clamp is missing; a sign, power or axis differs; sides or
      extremes are turned round; a row meets itself | ``factor_missing``, ``term_missing``, ``clamp_missing``,
      ``term_sign``, ``power_differs``, ``wrong_axes``, ``turned_round``, ``extreme_turned``, ``pairs_with_itself`` |
    | the form agrees, and a gradient flows through its target | ``target_with_gradient`` |
    | what is backpropagated falls as the form, or each difference, gets worse | ``sign_flipped`` |
    | both sides are reshaped copies and entries lie in different orders; or, whichever axis holds classes, some label
      meets a different position's scores | ``entries_misaligned`` |
    | any errors of mean 0 may be added and the loss stays | ``errors_cancel`` |
    | label * a and (1 - label) * b are added, and a equals b | ``ingredient_differs`` |
    | a minimum chooses one permutation for all rows; one row alone chooses another | ``mean_taken_early`` |
    | noise is scaled by another function of x than the KL divergence takes for the variance | ``parameter_confused`` |
    | two terms agree only once the outputs pass a sigmoid, softmax, tanh, exp or log | ``terms_disagree`` |

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
    What passes numpy, custom autograd functions or compiled kernels is not followed. A loss of very many entries is not
    looked at: a smaller batch shows the same. Forms with two mistakes agree with none. A prediction that targets go
    into is an error, and a distance is no score: neither is judged.

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
