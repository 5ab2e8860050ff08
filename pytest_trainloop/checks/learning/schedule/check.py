"""Learning rates follow their schedule, and the schedule fits the run.

What it does
    It follows the learning rate of every group through the watched run: its value at every step, and whether a
    scheduler or a line of the loop moved it. It then steps every scheduler of a fresh loop forward without training,
    and makes the calls that follow of a function of the project's that writes the rate. The result is one curve for
    each group, which it compares with ``steps=`` or ``epochs=``.

Why is this bad?
    A schedule that drives an optimizer which no longer steps, or that is written over at every batch, leaves the rate
    where it began: the run works, and ends a little worse than the paper says. Nothing raises.

How it decides
    Only identities are faults. What drives which rate: a scheduler moves an optimizer that another one, on the same
    weights and at a constant rate, has replaced; two equal ones drive one optimizer and none the other; a scheduler is
    never called by a fit that comes to its end over its passes, and holds no call that waits; two lines call one, both
    at each step, or one at each step and one at each pass; each rate that it leaves is set again before a step uses
    it; it, or the optimizer, is built for every step, or it is built again where the rate has come to 0 and stays
    there. What no step reads: a number called a rate that moves while no group's rate does; a rate written to the
    groups of ``state_dict()``, which are copies; a key of a group that is named like an option, or a multiple of
    one (``lr_scale``), and that nothing looks up in a further build and run of the loop. A multiple that nothing
    reads is a fault where a schedule runs; else the schedule may be outside of ``fit``, and it is advice.
    What contradicts itself: ``mode="max"`` on the loss that is minimized, a mode against the metric's own name, a
    metric given as the epoch, a lower bound above the rate, milestones that are no whole numbers. Groups at rate 0, and
    rates of 0 for some steps, are advice: unfreezing by rates looks like that. So is a group with a rate of its own
    that a filter by name leaves empty: a pattern is true of no name, and in a further build and step it puts parameters
    that all but have it (``backbone`` for ``model.backbone``) into that group once it gets the answer "yes" for them.
    The shape of the curve: the quotients of successive rates are exactly a warm-up or a decay (each call multiplies the
    last rate, not the base rate); the highest factor of a LambdaLR is the learning rate itself; the rate is constant to
    the last call and 0 from there, or rises from 0 to the base rate at the last step; a group falls to 0 for good
    while the others' warm-up ends; one call is made at half the rate or less. The last three are faults with a plan and
    advice without one.
    Length: the calls that the training makes follow from ``steps=`` or ``epochs=`` and from how often a short run makes
    one: once a step, a micro-batch or a pass. Faults are a schedule that raises before, whose rate still rises after
    twice these calls, that ends with the count of another unit of the plan, leaves a rate of 0 for more than half, has
    come to a millionth of its peak after three quarters, or after a warm-up falls for one epoch of several and rises
    again. Undeclared, a fit that comes to its own end
    is its own plan: over two windows and over three, the schedule ends with as many calls as there are steps, and is
    called once a pass; with the passes (three or more), and is called once a step; and the like. With the knob
    ``accumulate`` its length and its calls must change alike.
    A function of the project's is called on where its arguments are the same objects at every call, or numbers that
    grow by equal steps, and where every step of a further run was made at the rates that it left, or at one multiple of
    what it returned.

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
    Rates that ``fit`` computes itself, without a function, are known at the watched steps only; nor are those projected
    that follow a metric, or a position that the loop gives. A schedule built outside ``fit`` is not compared without
    ``steps=``: the batches of a test are not the plan. Copies of ``param_groups`` that the loop makes itself are not
    seen, nor are keys that are read before the optimizer is built and show in no rate. Momentum and weight decay that
    follow a schedule are not projected.

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
        settle="have fit call what reads it",
        change=("group", "optimizer"),
        source="https://github.com/msight-tech/research-ms-loss/issues/27",
    ),
}
"""The last one is found by a shared record (``records/unread_options.py``)."""


def _no_schedule(evidence: Evidence) -> str:
    from pytest_trainloop.instruments.records.learning_rates import rates

    record = evidence.run()
    if not record.steps:
        return "no optimizer step was seen"
    if record.schedulers or any(not group.constant for group in rates(record)):
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
    from pytest_trainloop.checks.learning.schedule import calls, rates

    record = evidence.run()
    yield from calls.drives_another(record)
    yield from calls.two_on_one(record)
    yield from calls.never_called(evidence)
    yield from calls.called_each_pass_too(evidence)
    yield from rates.overwritten(evidence)
    yield from rates.lost_by_hand(evidence)
    yield from calls.rebuilt(evidence)
    yield from rates.unread(evidence)
    yield from rates.copied(evidence)
    yield from calls.given(record)
    yield from rates.zero_for_good(record)
    yield from rates.groups(evidence)
    yield from rates.empty_groups(evidence)
