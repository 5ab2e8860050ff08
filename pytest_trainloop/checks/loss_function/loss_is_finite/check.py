"""A loss and its gradient are finite for every valid call.

What it does
    It calls the criterion in float32 with outputs and targets that have one special thing about them: a single row,
    one class only, all entries equal, zero vectors, entries around 200, probabilities that are exactly 0 and 1, an
    output that equals its target, some or all targets ignored.

Why is this bad?
    Each of these turns up in a long run: a last batch of one row, a crop without the object, a dead embedding, a
    sure and wrong prediction. One NaN spreads to every weight within a step.

How it decides
    A value or a gradient that is not finite is a fault where the true one can be represented: the same call in
    float64, with outputs halved until it is finite there, does not pass float32's largest number before that. What
    grows past it (an exponential of 200) is right to be infinite. Each case has one special thing, so the case that
    fails names it; where ordinary values fail, nothing is special about them. What torch's own losses do, nobody
    here can repair (``nn.SoftMarginLoss`` overflows from 89 on): advice. All targets ignored under a mean is 0 / 0,
    which torch documents as NaN: advice. So is a single row of embeddings, which has nothing to be compared with:
    ``min_rows=2`` says that it never comes.

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

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.losses.evidence import Found, LossEvidence

CAUSES = {
    "ordinary": "values with nothing special about them give what is not finite",
    "one_row": "a single row does, and more rows do not",
    "one_class": "targets of one class only do, and mixed ones do not",
    "no_partner": "a row whose label no other row has does, and labels with partners do not",
    "tied": "equal entries in the output do, and different ones do not",
    "zero": "an output of zeros does, and other values do not",
    "right": "an output that equals its target does, and another does not",
    "large": "entries around 200 do (10 for values), small ones do not, and the true value can be represented",
    "saturated": "probabilities of exactly 0 and 1 do, and those between do not",
    "some_ignored": "some ignored targets do, and the same rows without ignored targets do not",
    "all_ignored": "only where every target is ignored is the value, or the gradient, not finite",
}

_REPAIRS = {
    "ordinary": "compute the logarithm by log_softmax or logsigmoid; clamp what goes into log, sqrt and a divisor",
    "one_row": "leave out what needs two rows (a standard deviation, a mean over the others) where there is one",
    "one_class": "clamp_min(1) the count that is divided by; use torch.xlogy for p log p",
    "no_partner": "divide by the number of partners .clamp_min(1), and leave such rows out of the mean",
    "tied": "the slope of a root at 0 is infinite: sqrt(x + eps); divide by a spread of at least eps",
    "zero": "F.normalize and F.cosine_similarity have an eps; so must a norm that is divided by",
    "right": "the slope of a root at 0 is infinite: sqrt(x + eps)",
    "large": "use log_softmax, logsumexp, logsigmoid or softplus in place of log and exp",
    "saturated": "clamp probabilities to [eps, 1 - eps] before the logarithm, or take logits",
    "some_ignored": "index with the mask, or torch.where before the operation: NaN times 0 is NaN",
    "all_ignored": "divide by the number of targets that count .clamp_min(1), if such a batch can come",
}


@check(causes=CAUSES, rank=10, subject="loss")
def loss_is_finite(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.loss_is_finite import property as finite
    from pytest_trainloop.strategies import cases
    from pytest_trainloop.strategies.loss_cases import traits

    contract = evidence.contract
    found: dict[str, Found] = {}
    for trait in traits(contract):
        try:
            found |= {f.seen.cause: f for f in evidence.find(cases(contract, only=(trait,)), finite.look, share=0.25)}
        except CannotDecide:  # the criterion refuses such a call, as it may
            continue
        if "ordinary" in found:
            break
    for f in [f for trait, f in found.items() if not _BEHIND.get(trait, set()) & set(found)]:
        advice = evidence.of_torch or _may_be_meant(evidence, f)
        yield evidence.finding(f, _REPAIRS[f.seen.cause], level="advice" if advice else "fault")


_BEHIND = {"one_row": {"one_class"}, "zero": {"tied"}, "large": {"saturated"}}
"""Traits that bring another with them: a single row is of one class, vectors of zeros are equal, large logits give
probabilities of exactly 0 and 1."""


def _may_be_meant(evidence: LossEvidence, found: Found) -> bool:
    contract, cause = evidence.contract, found.seen.cause
    if cause == "all_ignored":
        return evidence.reduction == "mean"
    return cause == "one_row" and contract.expects == "embeddings"
