"""A loss takes its output for what the contract says: logits, log-probabilities or probabilities.

What it does
    It shifts all classes of a row by one number, and gives the criterion confident answers, correct and wrong ones.

Why is this bad?
    A softmax in front of a loss that has its own, or none where there must be one, trains: the loss falls a little
    and stays far from 0, or falls without bound.

How it decides
    1. Softmax of logits does not change when a number is added to all of them. A loss on top of it does not change
       either.
    2. In float64 both values must agree to half of the digits, relative to the size of the terms.
    3. Losses that judge classes one against all pass.
    4. Probabilities taken for logits are recognised by the value. With C classes, a confident correct answer then costs
       ``log(e + C - 1) - 1``, and a wrong one ``log(e + C - 1)``. That is the cross-entropy of a one-hot vector.

    | seen                                                              | cause                           | advice if |
    |-------------------------------------------------------------------|---------------------------------|-----------|
    | confident answers cost what item 4 says                           | ``probabilities_as_logits``     |           |
    | the change is in proportion to the shift (``nll_loss`` of logits) | ``linear_in_logits``            |           |
    | a shift over another axis changes nothing                         | ``wrong_axis``                  |           |
    | any other change (a penalty on the normaliser)                    | ``not_invariant``               | always    |
    | a shift of log-probabilities changes nothing                      | ``normalised_again``            | always    |
    | the value is a divergence with ``log_target=True``                | ``target_as_logarithm``         |           |
    | the value is a divergence of probabilities, not logarithms        | ``probabilities_as_logarithms`` |           |
    | the value is minus the target's probability                       | ``linear_in_probabilities``     | always    |

When it is skipped
    It skips values, embeddings and pairs of probabilities: no shift is known for them.

Faulty
    >>> def loss(output, target):
    ...     return F.cross_entropy(output.softmax(-1), target)
    >>> contract = LossContract(criterion=loss, expects="logits", num_classes=4)

Fixed
    >>> def loss(output, target):
    ...     return F.cross_entropy(output, target)
    >>> contract = LossContract(criterion=loss, expects="logits", num_classes=4)

Known limits
    Class weights and label smoothing on top of a second softmax change the exact values, and hide it. Pairs, values and
    embeddings are not judged.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.kl_div.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.losses.evidence import LossEvidence

CAUSES = {
    "probabilities_as_logits": Cause(
        proof="confident answers cost exactly what cross-entropy gives for 0 and 1 in place of logits",
        repair="leave out the softmax (or sigmoid) in front, or take the logarithm and use nll_loss",
    ),
    "linear_in_logits": Cause(
        proof="the value falls in proportion to a number added to all logits, so it has no lower bound",
        repair="put log_softmax over the classes in front of nll_loss, or use cross_entropy",
    ),
    "wrong_axis": Cause(
        proof="a number added along another axis changes nothing, and one added along the classes does",
        repair="normalise over the class axis: log_softmax(output, dim=class_dim)",
    ),
    "not_invariant": Cause(
        proof="a number added to all logits of a row changes the value, and classes are not judged one by one",
        repair="if it is intended (a penalty on the normaliser), skip it with that reason",
    ),
    "normalised_again": Cause(
        proof="log-probabilities go through another log_softmax, which does not change them",
        repair="use nll_loss on log-probabilities, or give logits to cross_entropy",
    ),
    "target_as_logarithm": Cause(
        proof="the value is exactly the divergence with log_target=True from a target of probabilities",
        repair="leave out log_target=True, or give target.log()",
    ),
    "probabilities_as_logarithms": Cause(
        proof="the value is exactly the divergence of probabilities in place of their logarithms",
        repair="kl_div(p.log(), target): its first argument holds log-probabilities",
    ),
    "linear_in_probabilities": Cause(
        proof="the value is exactly minus the probability of the target, without a logarithm",
        repair="nll_loss(p.log(), target): its first argument holds log-probabilities",
    ),
}


@check(causes=CAUSES, rank=20, subject="loss")
def loss_input_as_declared(evidence: LossEvidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss_function.loss_input_as_declared.property import misread_output

    expects, target = evidence.contract.expects, evidence.contract.target
    if expects in ("values", "embeddings") or (target == "pair" and expects != "logits"):
        raise CannotDecide(f"no shift is known to which expects={expects!r}, target={target!r} is invariant")
    yield from evidence.violations(misread_output, only=("ordinary",))
