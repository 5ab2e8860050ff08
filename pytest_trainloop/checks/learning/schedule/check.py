"""Learning rates follow their schedule, and the schedule fits the run.

What it does
    It follows the learning rate of every group through the watched run: its value at every step, and whether a
    scheduler or a line of the loop moved it. It then builds the loop again and steps every scheduler forward without
    training. If a function of the project writes the rate, it makes that function's later calls too. The result is one
    curve for each group, which it compares with ``steps=`` or ``epochs=``.

Why is this bad?
    The schedule may drive an optimizer that no longer steps, or be overwritten at every batch. The rate then stays
    where it began. Nothing raises: the run works, and ends a little worse than the paper says.

How it decides
    1. It notes each group's learning rate at every step, and before and after each call of a scheduler. Equal bits are
       equal rates. What a scheduler did not move, a line of the loop did (docs/how-it-decides.md#what-moves-a-rate).
    2. It then steps schedulers of a fresh loop without training. A project's function that writes the
       rate is called further if its arguments stay or grow by equal steps. Every step must have used what it wrote, or
       one multiple of it.
    3. It compares the length with the calls that ``steps=`` or ``epochs=`` gives. Runs over two and three windows show
       whether a call comes once a step, micro-batch or epoch. Undeclared, ``fit`` is the plan if it builds the schedule
       from its batches, or if the schedule ends with its epochs (docs/how-it-decides.md#how-long-a-schedule-is).
    4. For each curve it reports the first rule of the table that holds.
    5. If the plan follows from the data, it reports four findings on the length only: another unit, a curve that
       raises, one that fades out, and a very long warm-up.
    6. With ``accumulate``, the length and the calls of a schedule must change together. A call in each micro-batch
       alone is advice.
    7. A rate of exactly 0 to the end is a fault, ``zero_for_good``. A filter by name that leaves a group with its own
       learning rate empty is advice.

    | seen | cause | advice if |
    |---|---|---|
    | a scheduler moves a replaced optimizer; two share one | ``drives_another``, ``two_on_one`` | rates differ |
    | no call, and no function that ran could make one | ``never_called`` | one could come later |
    | two lines call it; it or its optimizer is built again; it and a line replace each other's rate; its lambdas share
      a variable | ``called_twice``, ``scheduler_rebuilt``, ``optimizer_rebuilt``, ``schedule_overwritten``,
      ``written_lr_lost``, ``lambdas_share_a_variable`` |  |
    | nothing reads the written rate, copy or key | ``lr_nobody_reads``, ``lr_written_to_copy``,
      ``option_nobody_reads`` | of multiples: no schedule |
    | mode, metric, bound or milestones contradict themselves; quotients are a warm-up; a LambdaLR returns the rate |
      ``plateau_mode``, ``plateau_metric_stands_still``, ``metric_as_epoch``, ``bound_above_lr``,
      ``milestones_not_whole``, ``factors_multiply``, ``lr_is_the_factor`` |  |
    | a group has rate 0 | ``group_at_zero`` | not 0 in the whole plan |
    | all groups have rate 0 for some steps; a group stays empty, or gets the rate of the others | ``zero_for_steps``,
      ``group_left_empty``, ``group_lrs_made_equal`` | always |
    | a group keeps its rate while others move | ``group_without_schedule``, ``one_group_scheduled`` | its rate
      was different |
    | constant, then 0; a group falls to 0 at warm-up; one dip | ``never_falls``,
      ``group_falls_to_zero``, ``dips_for_one_call`` | no plan |
    | its end is the plan's count of a different unit; a call in each micro-batch | ``counts_something_else``,
      ``per_micro_batch`` | only names show it; always |
    | it raises early; rises past twice the calls; is 1e-6 at 3/4 | ``runs_out``,
      ``ends_in_warmup``, ``fades_out`` | less than twice |
    | it is 0 from before half; rises again; is lowest after twice the training | ``over_too_early``, ``rises_again``,
      ``barely_begun`` | not 0; no epoch after warm-up; always |

When it is skipped
    It skips a constant learning rate. It also skips a schedule of unknown plan, unless something else is found.

Faulty
    >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)           # rebuilt: the scheduler keeps the old one
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    ...     scheduler.step()

Fixed
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    ...     scheduler.step()

Known limits
    Learning rates that ``fit`` computes itself, without a function, are known at the watched steps only. Those that
    follow a metric, or a position that the loop gives, are not projected. A schedule built outside ``fit`` is not
    compared without ``steps=``: the batches of a test are not the plan.

    Copies of ``param_groups`` that the loop makes itself are not seen, nor are keys that are read before the optimizer
    is built and show in no learning rate. Momentum and weight decay that follow a schedule are not projected.

References
    https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.causes import CAUSES as OWN
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    **OWN,
    "option_nobody_reads": Cause(
        proof=(
            "a key of a group is no option of its optimizer, looks like a misspelling of one or a multiplier of it, "
            "and nothing but torch looks it up while the loop is built or in fit"
        ),
        repair="the option's own name",
        judged="have fit call what reads it",
        change=("groups", "group", "optimizer"),
        source="https://github.com/msight-tech/research-ms-loss/issues/27",
    ),
}
"""The last one is found by a shared record (``records/unread_options.py``)."""


def _no_schedule(evidence: Evidence) -> str:
    from pytest_trainloop.instruments.records.learning_rates import lrs

    record = evidence.run()
    if not record.steps:
        return "no optimizer step was seen"
    if record.schedulers or any(not group.constant for group in lrs(record)):
        return ""
    return "the learning rate is constant, and no scheduler is used"


@check(needs={"run"}, causes=CAUSES, rank=5, steps=20, absent=_no_schedule)
def schedule(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.schedule import curves

    found = list(_of_the_record(evidence))
    planned: list[Finding] = []
    try:
        planned = list(curves.planned(evidence)) if evidence.repeatable else []
    except CannotDecide:
        if not found:  # what the plan alone would show is no reason to leave out what the record shows
            raise
    # what comes to 0 for good is over early; a group that has no rate in the whole plan has none in the watched run
    shown = {f.cause for f in found if f.level == "fault"} | {f.cause for f in planned if f.level == "fault"}
    yield from (f for f in found if f.level == "fault" or f.cause != "group_at_zero" or f.cause not in shown)
    yield from (f for f in planned if f.cause != "over_too_early" or "zero_for_good" not in shown)


def _of_the_record(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.schedule import calls, learning_rates

    record = evidence.run()
    yield from calls.drives_another(evidence)
    yield from calls.two_on_one(record)
    yield from calls.never_called(evidence)
    yield from calls.called_each_pass_too(evidence)
    yield from learning_rates.overwritten(evidence)
    yield from learning_rates.lost_by_hand(evidence)
    yield from calls.rebuilt(evidence)
    yield from learning_rates.unread(evidence)
    yield from learning_rates.copied(evidence)
    yield from calls.given(record)
    yield from learning_rates.zero_for_good(record)
    yield from learning_rates.groups(evidence)
    yield from learning_rates.empty_groups(evidence)
