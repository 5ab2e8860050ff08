"""zero_grad, backward, clipping and step come in an order in which each step uses just the gradients made for it.

What it does
    It follows every gradient through a watched run: what stood in ``.grad`` before each backward, what arrived, what
    the innermost optimizer step read, and which call cleared it. Where the function has the knob ``accumulate``, a run
    with windows of four micro-batches is judged as well.

Why is this bad?
    A forgotten ``zero_grad()`` sums the gradients of all batches so far, a misplaced one throws away what backward
    has just computed, a clip after the step clips nothing. The loop runs, the loss moves, and the result is a worse
    model.

How it decides
    Only identities are faults. A step uses a residual that an earlier step has used already and that is still
    bit-identical; steps find nothing although a backward pass produced something; in every accumulation window the
    gradients of some micro-batches are cleared while those of the last are used. User code answers for gradients that
    it assigns, except where one is assigned once and used by every step while backward passes bring others. Momentum
    kept in ``.grad`` is scaled, not identical; SAM moves the weights between backward and zeroing; by-product
    gradients of another network's parameters are cleared unused; batches skipped openly come in no regular windows.
    A clip is a fault where none of its calls (two or more) clips a gradient that a step uses, and no other clip covers
    what is stepped: before backward, after zeroing, handed gradients in place of parameters, an iterator that is used
    up, the net of another optimizer or a copy of it; or where it takes one of two groups that differ in weight decay
    only. What else it leaves out is advice: it may be meant. So is what a pass over the data leaves in ``.grad`` for
    the next one, a fault with the project's own loader whose number of batches does not divide. Weights that are
    pulled back to a point that never moves, so that they stay within four steps of it, cannot train.
    A step that uses its own passes and one that another optimizer has stepped with already is advice: the gradients of
    a generator's loss in the step of its discriminator, or an intended sum.
    A loop trains nothing if 400 batches bring neither backward pass nor step. Weights or buffers that it changes itself
    (closed forms, evolution), ``autograd.grad`` and tensors besides the model that get gradients excuse it.
    An optimizer that steps a few times and then lets 64 backward passes (and 8 of its windows) go by has stopped. The
    run is repeated from half and from twice the weights: where it stops after as many steps there, the losses did not
    stop it, and it is a fault; else advice. With the knob ``accumulate``, 64 windows without a step are a fault for 1
    and for 4 micro-batches, where the loop steps with its own value. The finding shows the condition of the step.

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
