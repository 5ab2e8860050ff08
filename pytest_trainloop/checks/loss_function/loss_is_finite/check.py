"""A loss and its gradient are finite for every valid call.

What it does
    It calls the criterion in float32 with outputs and targets that have one special property. These are a single row,
    one class only, all entries equal, zero vectors, and entries around 200. Also probabilities that are exactly 0 and
    1, an output that equals its target, and some or all targets ignored.

Why is this bad?
    Each of these turns up in a long run: a last batch of one row, a crop without the object, a dead embedding, a
    confident and wrong prediction. One NaN spreads to every weight within a step.

How it decides
    1. Each case has one special property, so the case that fails names the cause. Where ordinary values fail, no
       special property is needed.
    2. A non-finite value or gradient is a fault if float32 can represent the true one. The true one comes from the same
       call in float64, with outputs halved until it is finite. It must stay below float32's largest number.
    3. A loss that grows past that (an exponential of 200) is infinite correctly.
    4. Three cases are advice. A loss of torch itself cannot be repaired by the user (``nn.SoftMarginLoss`` overflows
       from 89 on). All targets ignored under a mean is 0 / 0, which torch documents as NaN. A single row of embeddings
       has nothing to be compared with: ``min_rows=2`` says that it never occurs.

Faulty
    >>> def cosine_loss(a, b):
    ...     a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)     # 0 / 0 for a zero vector
    ...     return (1 - (a * b).sum(1)).mean()
    >>> contract = LossContract(criterion=cosine_loss, expects="embeddings", target="pair")

Fixed
    >>> def cosine_loss(a, b):
    ...     return (1 - F.cosine_similarity(a, b)).mean()
    >>> contract = LossContract(criterion=cosine_loss, expects="embeddings", target="pair")

Known limits
    Values (``expects="values"``) lie within 10 of 0, since a model may put anything behind them; embeddings within
    a few hundred.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
    https://docs.pytorch.org/docs/stable/notes/autograd.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.losses.evidence import LossEvidence
    from pytest_trainloop.instruments.strategies.loss_cases import Trait

CAUSES = {
    "nonfinite_on_ordinary_input": Cause(
        proof="values with no special property give a non-finite result",
        repair="compute the logarithm by log_softmax or logsigmoid; clamp the arguments of log and sqrt, and divisors",
    ),
    "nonfinite_on_one_row": Cause(
        proof="a single row gives a non-finite result, and more rows do not",
        repair="leave out what needs two rows (a standard deviation, a mean over the others) where there is one",
        settle="LossContract(min_rows=2) says that one row never comes",
    ),
    "nonfinite_on_one_class": Cause(
        proof="targets of a single class give a non-finite result, and mixed ones do not",
        repair="clamp_min(1) the count that is the divisor; use torch.xlogy for p log p",
    ),
    "nonfinite_without_partner": Cause(
        proof="a row whose label no other row has gives a non-finite result, and labels with partners do not",
        repair="divide by the number of partners .clamp_min(1), and leave such rows out of the mean",
    ),
    "nonfinite_on_ties": Cause(
        proof="equal entries in the output give a non-finite result, and different ones do not",
        repair="the slope of a square root at 0 is infinite: sqrt(x + eps); divide by a spread of at least eps",
    ),
    "nonfinite_on_zeros": Cause(
        proof="an output of zeros gives a non-finite result, and other values do not",
        repair="F.normalize and F.cosine_similarity have an eps; a norm that is a divisor needs one as well",
    ),
    "nonfinite_on_correct_answers": Cause(
        proof="an output that equals its target gives a non-finite result, and another does not",
        repair="the slope of a square root at 0 is infinite: sqrt(x + eps)",
    ),
    "nonfinite_on_large_outputs": Cause(
        proof="entries around 200 (10 for values) give a non-finite result, small ones do not, and float32 can "
        "represent the true value",
        repair="use log_softmax, logsumexp, logsigmoid or softplus in place of log and exp",
        settle="LossContract(output_range=(low, high)) says which outputs come",
    ),
    "nonfinite_when_saturated": Cause(
        proof="probabilities of exactly 0 and 1 give a non-finite result, and those between do not",
        repair="clamp probabilities to [eps, 1 - eps] before the logarithm, or take logits",
        settle="LossContract(output_range=(low, high)) says which outputs come",
    ),
    "nonfinite_when_some_ignored": Cause(
        proof="some ignored targets give a non-finite result, and the same rows without ignored targets do not",
        repair="index with the mask, or torch.where before the operation: NaN times 0 is NaN",
    ),
    "nonfinite_when_all_ignored": Cause(
        proof="the value or the gradient is non-finite only where every target is ignored",
        repair="divide by the number of targets that count .clamp_min(1), if such a batch can occur",
    ),
}

IMPLIED: dict[Trait, Trait] = {"one_row": "one_class", "zero": "tied", "large": "saturated"}
"""Special properties that have another one as well: a single row is of one class, vectors of zeros are equal, large
logits give probabilities of exactly 0 and 1. Where that one fails alone, it is the cause."""


@check(causes=CAUSES, rank=10, subject="loss")
def loss_is_finite(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.loss_is_finite.property import nonfinite_result
    from pytest_trainloop.instruments.strategies.loss_cases import traits

    found: dict[Trait, Finding] = {}
    for trait in traits(evidence.contract):
        try:
            for finding in evidence.violations(nonfinite_result, only=(trait,), share=0.25):
                found[trait] = finding
        except CannotDecide:  # the criterion raises for such a call, as it may
            continue
        if "ordinary" in found:
            break
    yield from (finding for trait, finding in found.items() if IMPLIED.get(trait) not in found)
