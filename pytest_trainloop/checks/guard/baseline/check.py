"""The loop makes the steps that were recorded before a refactor.

What it does
    It runs the loop for 24 optimizer steps, in float64 and in its own precision. It compares data, weights, outputs of
    modules, losses, gradients, learning rates and updates with the baseline. That is a file which
    ``pytest --trainloop --trainloop-update-new`` writes next to the test. A check alone never writes it.

Why is this bad?
    A refactor that should keep the mathematics and does not is found weeks later, as a run that is a little worse
    than the one before: an eps in a norm, a decayed bias, a mean that became a sum.

How it decides
    1. Gradients that a step reads, learning rates, and weights and buffers after the step are compared in float64. If
       they agree to rounding, the loop passes.
    2. The bound of each place is 1e3 times the difference that one unit in the last place of the weights makes there
       (docs/how-it-decides.md#a-baseline). A place that such a change moves by any amount (the bias before a batch
       norm) decides nothing. So another machine, thread count or version of torch passes.
    3. Otherwise the finding names the first step and the first place in it: batch, output of a module, loss, gradient,
       learning rate, update.
    4. Tensors are one if they begin with the same values. Renamed, moved, transposed, joined or split ones are a note.
    5. The loop's own precision is compared on the environment of the baseline only: dtypes, and the gradient of the
       first step.

    | first that holds                                                                 | cause                      |
    |----------------------------------------------------------------------------------|----------------------------|
    | the weights differ before the first step                                         | ``initial_weights_differ`` |
    | a parameter, option, call or scheduler differs and can make the first difference | ``setup_differs``          |
    | nothing of the setup explains the first difference                               | ``steps_differ``           |
    | gradients and updates agree, and only a loss's value differs (advice)            | ``steps_differ``           |
    | float64 agrees, the loop's own precision does not                                | ``precision_differs``      |
    | the values agree under other names (a note)                                      | ``renamed``                |

When it is skipped
    It skips a run that is not comparable with its baseline.

Faulty
    >>> def forward(self, x):
    ...     x = self.encoder(x.to(self.head.weight.dtype))
    ...     return self.head(x / x.norm(dim=1, keepdim=True))

Fixed
    >>> def forward(self, x):
    ...     return self.head(self.encoder(x.to(self.head.weight.dtype)))

Known limits
    From other initial weights no step can be compared: if a refactor draws them in a different order, the finding says
    that only the random numbers differ. What acts after the last recorded step is seen in settings of schedulers only.
    A place at which the loop multiplies rounding to more than 1 % is not judged. A check makes 60 optimizer steps of
    the loop, 12 of them in the run that all checks share, and about 120 where numbers differ at all; recording makes
    108.

References
    https://pytest-regressions.readthedocs.io/en/latest/overview.html
    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.guard.baseline.causes import CAUSES, COMMAND
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"fit"}, causes=CAUSES, rank=10, steps=10, long=True)
def baseline(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.guard.baseline.judging import Reported, changes, compare, not_comparable
    from pytest_trainloop.instruments.baselines.kept import stored_and_fresh

    if not evidence.repeatable:
        raise CannotDecide("a baseline takes further runs of the loop: return a TrainLoop from a marked test")
    old, new = stored_and_fresh(evidence)
    file = evidence.baseline
    if file is not None and file.is_to_be_recorded:
        file.changes = () if old is None else changes(old, new)
        return
    if file is None or old is None:
        return  # for the types: both are there
    if why := not_comparable(old, new):
        raise CannotDecide(why)
    for finding in compare(old, new, evidence, evidence.shared(Reported)):
        repair = finding.repair or CAUSES[finding.cause].repair
        yield replace(finding, repair=repair.replace(COMMAND, file.command))
