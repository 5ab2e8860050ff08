"""The loop makes the steps that were recorded before a refactor.

What it does
    It runs the loop for 24 optimizer steps, in float64 and in its own precision, and compares data, weights, outputs of
    modules, losses, gradients, learning rates and updates with the baseline, a file that ``pytest --trainloop
    --trainloop-update-new`` writes beside the test. A check alone never writes it.

Why is this bad?
    A refactor that is meant to keep the mathematics and does not is found weeks later, as a run that is a little worse
    than the one before: an eps in a norm, a decayed bias, a mean that became a sum.

How it decides
    Gradients that a step reads, rates, and weights and buffers after it are what training is. Where they agree in
    float64 to rounding the loop is the same. The bound of each place is 1e3 times the difference that one unit in the
    last place of the weights makes there; what such a change throws anywhere (the bias before a batch norm) decides
    nothing, so that another machine, thread count or version of torch passes. Where they differ, the first step and the
    first place in it are named: batch, output of a module, loss, gradient, rate, update.
    Tensors are the same that begin with the same values: renamed, moved, transposed, joined or split ones are a note.
    What changed apart from the numbers (a parameter that no optimizer holds, an option of a group, a call, a scheduler)
    is the cause where it can make the difference that is seen first. The loop's own precision is compared on the
    environment of the baseline only: dtypes, and the gradient of the first step.

Faulty
    >>> def forward(self, x):
    ...     x = self.encoder(x.to(self.head.weight.dtype))
    ...     return self.head(x / x.norm(dim=1, keepdim=True))

Fixed
    >>> def forward(self, x):
    ...     return self.head(self.encoder(x.to(self.head.weight.dtype)))

Known limits
    From other initial weights no step can be compared: where a refactor draws them in another order, the finding says
    that only the random numbers are others. What acts after the last recorded step is seen in settings of schedulers
    alone. A place at which the loop multiplies rounding to more than 1 % is not judged.
    A check makes 60 optimizer steps of the loop, 12 of them in the run that all checks share, and about 120 where
    numbers differ at all; recording makes 108.

References
    https://pytest-regressions.readthedocs.io/en/latest/overview.html
    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

_COMMAND = "pytest --trainloop --trainloop-only=baseline --trainloop-update TEST"
_ACCEPT = f"accept what is meant: {_COMMAND}"

CAUSES = {
    "data_differs": Cause(
        proof="the batch that the loop takes is another one than at this step of the baseline",
        repair=f"give the loop the batches of the baseline; or {_ACCEPT}",
        change=("loader",),
    ),
    "initial_weights_differ": Cause(
        proof="the weights are others before the first step",
        repair=f"initialise them as in the baseline; or {_ACCEPT}",
        change=("module",),
    ),
    "parameters_differ": Cause(
        proof="no parameter has these values at the start, under any name, joined or split",
        repair=f"keep the parameters of the baseline; or {_ACCEPT}",
        change=("module",),
    ),
    "output_differs": Cause(
        proof="batch and weights are those of the baseline, and this is the first module whose output is not",
        repair=f"undo what changed there; or {_ACCEPT}",
    ),
    "loss_differs": Cause(
        proof="all modules give what they gave in the baseline, and the value given to backward is another one",
        repair=f"compute the loss as in the baseline; or {_ACCEPT}",
    ),
    "gradient_differs": Cause(
        proof="outputs and loss are those of the baseline, and the gradient that the step reads is another one",
        repair=f"look for detach(), no_grad() or a scaled gradient between the loss and what differs; or {_ACCEPT}",
    ),
    "rate_differs": Cause(
        proof="the gradient is that of the baseline, and the learning rate of the step is another one",
        repair=f"set the rate of the baseline; or {_ACCEPT}",
        change=("scheduler", "optimizer"),
    ),
    "update_differs": Cause(
        proof="gradient, rate and options are those of the baseline, and the step moves weights otherwise",
        repair=f"compute the update as in the baseline; or {_ACCEPT}",
        change=("step", "optimizer"),
    ),
    "buffer_differs": Cause(
        proof="gradients and updates are those of the baseline, and a buffer is another one after the step",
        repair=f"keep momentum and mode of the module that holds it; or {_ACCEPT}",
        change=("module",),
    ),
    "left_out_of_optimizer": Cause(
        proof="an optimizer of the baseline holds them, and none does now",
        repair=f"give them to the optimizer again; or {_ACCEPT}",
        change=("group",),
    ),
    "group_differs": Cause(
        proof="an option of their group is another one, and their update is the first thing that differs",
        repair=f"the option of the baseline; or {_ACCEPT}",
        change=("group",),
    ),
    "optimizer_differs": Cause(
        proof="the optimizer is of another class, and the update is the first thing that differs",
        repair=f"the class of the baseline; or {_ACCEPT}",
        change=("optimizer",),
    ),
    "frozen_differs": Cause(
        proof="requires_grad is another one than in the baseline as the run begins",
        repair=f"requires_grad_() as in the baseline; or {_ACCEPT}",
        change=("freeze", "module"),
    ),
    "scheduler_differs": Cause(
        proof="the scheduler of the baseline is gone, or has another setting",
        repair=f"build the scheduler of the baseline, and step it; or {_ACCEPT}",
        change=("scheduler",),
    ),
    "calls_differ": Cause(
        proof="a call of the loop between two steps is gone, new or elsewhere, and what it changes differs first",
        repair=f"call it where the baseline does; or {_ACCEPT}",
    ),
    "precision_differs": Cause(
        proof="in float64 the loops are the same, and in their own precision they are not",
        repair=f"the dtype of the baseline; or {_ACCEPT}",
        change=("cast",),
    ),
    "renamed": Cause(
        proof="the tensors begin with the same values",
        repair=f"{_COMMAND} writes the new names into the baseline",
    ),
}


@check(needs={"fit"}, causes=CAUSES, rank=10, steps=10, long=True)
def baseline(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.baselines.kept import stored_and_fresh
    from pytest_trainloop.checks.guard.baseline.accepted import changes, with_command
    from pytest_trainloop.checks.guard.baseline.further_courses import FurtherCourses
    from pytest_trainloop.checks.guard.baseline.judging import comparable, compare
    from pytest_trainloop.checks.guard.baseline.lines import with_line
    from pytest_trainloop.checks.guard.baseline.reported import Reported

    if not evidence.repeatable:
        raise CannotDecide("a baseline takes further runs of the loop: return a TrainLoop from a marked test")
    old, new = stored_and_fresh(evidence)
    file = evidence.baseline
    if file is not None and file.is_to_be_recorded:
        file.changes = () if old is None else changes(old, new)
        return
    if file is None or old is None:
        return  # for the types: both are there
    if why := comparable(old, new):
        raise CannotDecide(why)
    for finding in compare(old, new, FurtherCourses(evidence, new).of, evidence.shared(Reported).note):
        found = with_line(finding, new, evidence)
        yield with_command(found, CAUSES[found.cause].repair, file.command)
