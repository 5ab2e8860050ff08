"""zero_grad, backward, clipping and step come in an order in which each step uses just the gradients made for it.

What it does
    It follows every gradient through a watched run: what was in ``.grad`` before each backward, what arrived, what the
    innermost optimizer step read, and which call cleared it. Where the function has the knob ``accumulate``, a run with
    windows of four micro-batches is judged as well.

Why is this bad?
    A forgotten ``zero_grad()`` sums the gradients of all batches so far, a misplaced one throws away what backward
    has just computed, a clip after the step clips nothing. The loop runs, the loss moves, and the result is a worse
    model.

How it decides
    1. Faults of order are exact observations (docs/how-it-decides.md#order-of-backward-zeroing-and-steps): a gradient
       read twice, by no step, or missing. Gradients that user code assigns are left out, unless one assignment serves
       every step while backward passes bring others.
    2. Four patterns are not reported: momentum kept in ``.grad``, SAM, another network's gradients that are cleared
       unused, and batches skipped on purpose.
    3. An optimizer has stopped if it makes no step during 64 backward passes and 8 of its windows. The check repeats
       the run from weights multiplied by 0.5 and by 2. If it stops after as many steps there, it is a fault: the losses
       did not stop it. With the knob ``accumulate``, 64 windows without a step are a fault for 1 and 4 micro-batches.
    4. A clip is useless if none of its calls (two or more) clips a gradient that a step uses, and no other clip covers
       what is stepped.
    5. A loop trains nothing (``nothing_trains``) if 400 batches bring neither backward pass nor step. Own changes of
       weights or buffers, ``autograd.grad`` and trained tensors outside the model excuse it.
    6. Gradients that an epoch leaves in ``.grad`` for the next are a fault if the project's own loader has a number of
       batches that the windows do not divide.
    7. It skips a loop whose weights change without backward passes and steps.

    | seen | cause | advice if |
    |---|---|---|
    | a step uses a residual that an earlier step used, bit for bit | ``not_zeroed``, ``wrong_object_zeroed`` |  |
    | one gradient is used twice, or an assigned one by every step | ``stepped_twice`` and others |  |
    | steps find nothing, backward passes brought something | ``zeroed_before_step``, ``step_before_backward`` |  |
    | steps without backward, or passes without step | ``backward_missing``, ``step_missing`` | unless step 3 holds |
    | in every window some micro-batches are cleared | ``zeroed_inside_window`` |  |
    | a clip or a scheduler is on the wrong side of its step | ``clip_after_step`` and another |  |
    | a step uses passes that another optimizer stepped with | ``another_loss_kept`` | always |
    | a clip is useless: too late, zeroed, another net | ``clips_nothing``, ``clips_another`` | a shared line |
    | a clip takes one of two groups split by weight decay | ``clips_one_group`` |  |
    | a clip leaves out other parts, or acts in a window | ``clip_leaves_out``, ``clip_inside_window`` | always |
    | gradients are left after an epoch | ``leaks_into_next``, ``window_left_over`` | unless step 6 holds |
    | weights are pulled back to a fixed point | ``step_taken_back`` | weights get four steps away from it |

Faulty
    >>> for x, y in batches:
    ...     loss = F.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()                    # nothing zeroes the gradients

Fixed
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss = F.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()

Known limits
    Writes to gradients are seen in the first twelve steps only. A clip whose limit is infinite or above 1e5 is taken
    for a norm that is logged. Of clips written by hand the coverage is not known: they excuse, and are not accused.

References
    https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html
    https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.step_order.causes import CAUSES, found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


NOT_OF_ORDER = ("scheduler_before_optimizer", "step_taken_back")
"""Causes of which the order of zeroing, backward passes, clips and steps says nothing."""


@check(needs={"fit"}, causes=CAUSES, rank=30)
def step_order(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.instruments.records.gradient_ledger import Ledger

    order = None
    for finding in _rules(evidence):
        order = Ledger(evidence.run()).order_seen() if order is None else order
        said = not order or "order seen" in finding.shown_by or finding.cause in NOT_OF_ORDER
        yield finding if said else replace(finding, shown_by=f"{finding.shown_by}; order seen: {order}")


def _rules(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.step_order import clips, further, moves, uses
    from pytest_trainloop.instruments.records.gradient_ledger import Ledger

    record = evidence.run()
    ledger = Ledger(record)
    clipped = list(clips.clip_findings(ledger))
    named = {finding.where for finding in clipped}
    order = [f for f in uses.call_order(ledger) if f.cause != "clip_after_step" or f.where not in named]
    if not order and not record.steps and (idle := evidence.shared(further.untrained)):
        yield idle
        return
    if not order and not record.backwards() and not record.steps:
        raise CannotDecide(
            f"no backward pass and no optimizer step was seen in {record.items} batches: weights that change in other "
            "ways have no order of calls"
        )
    misused = list(uses.gradient_use(evidence, ledger))
    yield from [*order, *misused]
    if misused:
        return
    yield from clipped
    yield from moves.first_gradient_kept(ledger)
    yield from moves.step_taken_back(evidence, ledger)
    accumulates = None if record.raised else further.accumulating(evidence)
    if never := list(uses.never_steps_with(evidence, ledger)):
        yield from never
        return
    if accumulates:
        ledger = Ledger(accumulates)
    yield from clips.inside_windows(ledger, bite=not accumulates)
    yield from uses.cleared_inside(ledger, further.ACCUMULATE if accumulates else 0)
    if leaking := evidence.shared(further.leak):
        yield leaking
    elif not accumulates and (left := ledger.left_open()):
        facts = {"left": len(left), "passes": len(ledger.passes), "items": record.items, "level": "advice"}
        yield found("window_left_over", left[0].backward, ("optimizer.step()",), **facts)
