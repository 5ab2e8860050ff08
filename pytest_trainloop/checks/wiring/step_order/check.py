"""Each optimizer step uses all gradients that were computed for it, and no others.

What it does
    It watches one run and records each gradient: before a backward pass, after it, when a step reads it, and when it is
    cleared. A "window" is the micro-batches of one optimizer step. If the test has the knob ``accumulate``, the check
    also runs with windows of four.

Why is this bad?
    A forgotten ``zero_grad()`` adds up the gradients of all batches. A misplaced one throws away what backward has just
    computed. A clip after the step clips nothing. The loop runs, the loss moves, and the result is a worse model.

How it decides
    1. An order fault is an exact observation (docs/how-it-decides.md#order-of-backward-zeroing-and-steps). A gradient
       is used twice, it is never used, or a step finds none although backward computed one.
    2. Gradients that your code assigns are ignored. Exception: steps use one assigned gradient again and again although
       backward computes new ones.
    3. Four patterns are not reported: momentum kept in ``.grad``, SAM that clears its first gradient, gradients of
       another network that are cleared before use, and batches skipped on purpose.
    4. An optimizer counts as stopped after 64 backward passes and 8 of its windows without a step. The check repeats
       the run from weights multiplied by 0.5 and by 2. If it stops after the same number of steps there, the losses did
       not stop it: a fault.
    5. With ``accumulate`` at 4 (and at 1, if the loop accumulates by default), 64 windows without a step are a fault.
    6. A clip is useless if no step uses what it clipped, in two or more calls, and no other clip covers what the steps
       use.
    7. 400 batches without a backward pass and without a step train nothing. Exceptions: your code changes weights or
       buffers itself, calls ``autograd.grad``, or trains tensors outside the model.
    8. Gradients left before an epoch and used in it are a fault if the window does not divide your loader's number of
       batches.

    | seen | cause | advice if |
    |---|---|---|
    | a step uses gradients that an earlier step already used, bit for bit | ``not_zeroed``,
      ``wrong_object_zeroed`` |  |
    | one gradient is stepped twice, or an assigned one at every step | ``stepped_twice``, ``two_optimizers``,
      ``gradient_kept`` |  |
    | gradients are cleared before their step, or the step comes before backward | ``zeroed_before_step``,
      ``zeroed_inside_window``, ``step_before_backward`` |  |
    | steps without backward passes, or neither of them | ``backward_missing``, ``nothing_trains`` |  |
    | backward passes without a step | ``step_missing`` | it steps at first, and item 4 does not hold |
    | a clip comes after its step, or a scheduler steps before the optimizer | ``clip_after_step``,
      ``scheduler_before_optimizer`` |  |
    | a step adds another optimizer's gradients, or SAM's first one | ``another_loss_kept``, ``first_gradient_kept`` |
      always |
    | a clip is useless (nothing to clip yet, zeroed, a different network), or takes one of two groups split by weight
      decay | ``clips_nothing``, ``clips_another``, ``clips_one_group`` | ``clips_another``: its line clips several
      networks |
    | a clip leaves out other parts, or acts in a window; the last window is short | ``clip_leaves_out``,
      ``clip_inside_window``, ``window_left_over`` | always |
    | the first step of an epoch, or call of ``fit``, uses gradients left before it | ``leaks_into_next`` | item 8
      does not hold |
    | weights are pulled back to a fixed point | ``step_taken_back`` | they can get further than four steps from it |

When it is skipped
    - The run has no backward pass and no optimizer step, and the weights change in other ways.

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
    It sees writes to gradients in the first twelve steps only. A clip with a limit of 1e5 or more is treated as logging
    of the norm. It cannot tell what a hand-written clip covers, so it reports no such clip, and no parameter whose
    gradient is written by hand as unclipped.

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
