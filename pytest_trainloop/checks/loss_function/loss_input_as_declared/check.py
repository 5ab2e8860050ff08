"""A loss takes its output for what the contract says: logits, log-probabilities or probabilities.

What it does
    It shifts all classes of a row by one number, and gives the criterion answers that are sure and right or wrong.

Why is this bad?
    A softmax in front of a loss that has its own, or none where there must be one, trains: the loss falls a little
    and stays far from 0, or falls for ever.

How it decides
    Softmax of logits does not change when a number is added to all of them; so does no loss on top of it. In
    float64 both values agree to all but a few of 16 digits, times the size of what was added up; half the digits is
    the limit. A loss that does change is a fault where what it does instead is exact: it changes in proportion to
    the shift (``nll_loss`` of logits), or a shift over another axis changes nothing (softmax over the wrong one).
    Losses that judge classes one against all are silent; others (a penalty on the normaliser) get advice.
    Probabilities that are taken for logits are told by value: a sure answer then costs log(e + C - 1) - 1 if right
    and log(e + C - 1) if wrong, the cross-entropy of a one-hot vector. A divergence of probabilities in place of
    their logarithms is told by its own sum.

Faulty
    >>> def loss(output, target):
    ...     return F.cross_entropy(output.softmax(-1), target)
    >>> contract = LossContract(criterion=loss, expects="logits", num_classes=4)

Fixed
    >>> def loss(output, target):
    ...     return F.cross_entropy(output, target)
    >>> contract = LossContract(criterion=loss, expects="logits", num_classes=4)

Known limits
    Values under class weights and label smoothing on top of a second softmax are not the exact ones, and say
    nothing. Nothing is known of pairs, values and embeddings.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.kl_div.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.losses.evidence import LossEvidence

CAUSES = {
    "probabilities_as_logits": "sure answers cost exactly what cross-entropy gives for 0 and 1 in place of logits",
    "linear_in_logits": "the value falls in proportion to a number added to all logits, so it has no lower bound",
    "wrong_axis": "a number added along another axis changes nothing, and one added along the classes does",
    "not_invariant": "a number added to all logits of a row changes the value, and classes are not judged one by one",
    "normalised_again": "log-probabilities go through another log_softmax, which leaves them as they are",
    "target_as_logarithm": "the value is exactly the divergence with log_target=True from a target of probabilities",
    "probabilities_as_logarithms": "the value is exactly the divergence of probabilities in place of their logs",
    "linear_in_probabilities": "the value is exactly minus the probability of the target, without a logarithm",
}

_REPAIRS = {
    "probabilities_as_logits": "leave out the softmax (or sigmoid) in front, or take the logarithm and use nll_loss",
    "linear_in_logits": "put log_softmax over the classes in front of nll_loss, or use cross_entropy",
    "wrong_axis": "normalise over the class axis: log_softmax(output, dim=class_dim)",
    "not_invariant": "if it is meant (a penalty on the normaliser), skip it with that reason",
    "normalised_again": "use nll_loss on log-probabilities, or give logits to cross_entropy",
    "target_as_logarithm": "leave out log_target=True, or give target.log()",
    "probabilities_as_logarithms": "kl_div(p.log(), target): its first argument holds log-probabilities",
    "linear_in_probabilities": "nll_loss(p.log(), target): its first argument holds log-probabilities",
}


@check(causes=CAUSES, rank=20, subject="loss")
def loss_input_as_declared(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.loss_input_as_declared import property as kinds
    from pytest_trainloop.errors import CannotDecide
    from pytest_trainloop.strategies import cases

    contract = evidence.contract
    if not kinds.applies(contract.expects, contract.target):
        raise CannotDecide(f"no shift is known to leave expects={contract.expects!r}, target={contract.target!r} alone")
    for f in evidence.find(cases(contract, only=("ordinary",)), kinds.look):
        yield evidence.finding(f, _REPAIRS[f.seen.cause], level="advice" if f.seen.cause in _MAY_BE_MEANT else "fault")


_MAY_BE_MEANT = ("not_invariant", "normalised_again", "linear_in_probabilities")
