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
    A loop trains nothing if 400 batches bring neither backward pass nor step. Weights or buffers that it changes itself
    (closed forms, evolution), ``autograd.grad`` and tensors besides the model that get gradients excuse it.

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

from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.consequences import LEARNING, TRAINING
from pytest_trainloop.checks.wiring.step_order.clip_causes import CLIP_CAUSES
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import GradientLedger
    from pytest_trainloop.runs.evidence import Evidence

ACCUMULATE = 4

CAUSES = {
    "not_zeroed": Cause(
        proof=(
            "a step uses gradients that an earlier step has used already, bit for bit; or gradients that are not "
            "finite stay in .grad, and all others are added to them"
        ),
        repair="optimizer.zero_grad() before this line, or right after optimizer.step()",
        explains=TRAINING,
        change=(
            "backward",
            "seen",
        ),
    ),
    "wrong_object_zeroed": Cause(
        proof="a zero_grad runs before each backward, but not on the parameters whose used gradients are still there",
        repair="optimizer.zero_grad() of the optimizer that holds these parameters, in place of this line",
        explains=TRAINING,
        change=("seen",),
    ),
    "zeroed_before_step": Cause(
        proof="gradients are zeroed between backward and step, so steps find nothing",
        repair="move this line before backward() or after step(): never between the two",
        explains=TRAINING,
        change=("seen",),
    ),
    "zeroed_inside_window": Cause(
        proof="in every window the gradients of all micro-batches but the last are zeroed before the step",
        repair="move this line behind optimizer.step(): once for each step, and not for each micro-batch",
        explains=("accumulation_equivalence", *TRAINING),
        change=("seen",),
    ),
    "step_missing": Cause(
        proof="backward passes bring gradients, and the optimizer that holds the parameters never steps",
        repair="call optimizer.step() after backward()",
        explains=TRAINING,
        change=("seen",),
    ),
    "backward_missing": Cause(
        proof="the optimizer steps again and again, and no backward pass brings a gradient",
        repair="loss.backward() before this line, with the parentheses",
        explains=TRAINING,
        change=("seen",),
    ),
    "nothing_trains": Cause(
        proof=(
            "in 400 batches there is no backward pass and no optimizer step, and no weight or buffer of the model "
            "changes in any other way"
        ),
        repair="call loss.backward() and optimizer.step() for each batch that fit is given",
        explains=TRAINING,
    ),
    "step_before_backward": Cause(
        proof="the step runs between the forward pass and its backward",
        repair="order: zero_grad(), forward, backward(), step()",
        explains=TRAINING,
        change=("seen",),
    ),
    "stepped_twice": Cause(
        proof="the same optimizer uses the same gradient more than once, with no backward between",
        repair="remove this step(): one for each backward pass (or window) was made before",
        explains=TRAINING,
        change=("seen",),
    ),
    "gradient_kept": Cause(
        proof="steps use one gradient that user code assigned, while backward passes bring others",
        repair="make this line run before every step: master.grad = p.grad.float()",
        explains=TRAINING,
        change=("seen",),
    ),
    "two_optimizers": Cause(
        proof="two optimizers use the same gradient of the same parameter",
        repair="leave these parameters out of one of the two optimizers",
        explains=TRAINING,
        change=(
            "group",
            "seen",
        ),
    ),
    "clip_after_step": Cause(
        proof="gradients are clipped after the step has used them and before they are zeroed",
        repair="clip between backward() and step()",
        explains=("finite", *LEARNING),
        change=("seen",),
    ),
    "scheduler_before_optimizer": Cause(
        proof="in the first iteration the scheduler steps before any optimizer does, and goes on from the same line",
        repair="move this line behind optimizer.step()",
        change=("seen",),
    ),
    "window_left_over": Cause(
        proof="the run of a loop without the knob accumulate ends with gradients that no step used",
        repair="step once more after the loop when a window is open, or drop the remainder on purpose (drop_last=True)",
        change=("seen",),
    ),
    **CLIP_CAUSES,
}


@check(needs={"fit"}, causes=CAUSES, rank=30)
def step_order(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.step_order import findings
    from pytest_trainloop.checks.wiring.step_order.clip_findings import clip_findings, inside_findings
    from pytest_trainloop.checks.wiring.step_order.leaks import accumulating, leak
    from pytest_trainloop.checks.wiring.step_order.untrained import untrained
    from pytest_trainloop.checks.wiring.step_order.windows import cleared_inside
    from pytest_trainloop.records.gradient_ledger import gradient_ledger
    from pytest_trainloop.records.windows import left_open

    record = evidence.run()
    clips = list(clip_findings(record))
    order = list(_call_order(record, {clip.where for clip in clips}))
    if not order and not record.steps and (idle := evidence.shared(untrained)):
        yield findings.of_step_without_optimizer(idle) if idle.backwards else findings.of_untrained(idle)
        return
    if not order and not record.backwards() and not record.steps:
        raise CannotDecide(
            f"no backward pass and no optimizer step was seen in {record.items} batches: weights that change in other "
            "ways have no order of calls"
        )
    ledger = gradient_ledger(record)
    misused = list(_gradient_use(evidence, record, ledger))
    yield from [*order, *misused]
    if misused:
        return
    yield from clips
    yield from _moved_by_hand(evidence, record)
    if record.raised is None and (accumulates := accumulating(evidence)) is not None:
        record = accumulates
        if inside := cleared_inside(record, gradient_ledger(record), ACCUMULATE):
            yield findings.of_cleared_inside(inside)
        yield from inside_findings(record, judged_elsewhere=True)
        if leaking := evidence.shared(leak):
            yield findings.of_leak(leaking)
        return
    yield from inside_findings(record, judged_elsewhere=False)
    if inside := cleared_inside(record, ledger):
        yield findings.of_cleared_inside(inside)
    if leaking := evidence.shared(leak):
        yield findings.of_leak(leaking)
    elif left := left_open(record, ledger):
        yield findings.of_left_open(record, left, len(ledger.backwards))


def _moved_by_hand(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Weights that user code moves between the backward passes of a step, or back after it."""
    from pytest_trainloop.checks.wiring.step_order import move_findings, moved_by_hand

    if kept := moved_by_hand.kept_gradient(record):
        yield move_findings.of_kept_gradient(kept)
    if pull := moved_by_hand.pull(record):
        from pytest_trainloop.checks.wiring.step_order.weight_writes import line_of_write

        yield move_findings.of_pull(pull, line_of_write(evidence, pull.parameters))


def _call_order(record: Record, named: set[str]) -> Iterator[Finding]:
    """Faults in the order of clips, scaler calls and schedulers, but for the lines that are named already."""
    from pytest_trainloop.checks.wiring.step_order import call_order, findings

    late = map(findings.of_late_clips, call_order.late_clips(record))
    yield from (clip for clip in late if clip.where not in named)
    if update := call_order.unstepped_scaler(record):
        scaled = sum(c.what == "scale" for c in record.scaler_calls())
        yield findings.of_unstepped_scaler(update, scaled, record.raised)
    if step := call_order.early_scaler_step(record):
        yield findings.of_early_scaler_step(step, record.raised)
    yield from map(findings.of_early_scheduler, call_order.early_schedulers(record))


def _gradient_use(evidence: Evidence, record: Record, ledger: GradientLedger) -> Iterator[Finding]:
    """Faults in what the steps of each optimizer use; the first one found of an optimizer stands for all."""
    from pytest_trainloop.checks.wiring.step_order import (
        empty_steps,
        findings,
        late_backwards,
        missing_calls,
        reused_gradients,
    )

    faults: tuple[tuple[Callable[[Any], Finding], Iterable[Any]], ...] = (
        (findings.of_missing_backward, missing_calls.missing_backward(record, ledger)),
        (findings.of_missing_step, missing_calls.missing_steps(evidence, record, ledger)),
        (findings.of_empty_steps, empty_steps.empty_steps(record, ledger)),
        (findings.of_late_backwards, late_backwards.late_backwards(record, ledger)),
        (findings.of_refused_backward, late_backwards.refused_backward(record)),
        (findings.of_stale, reused_gradients.stale_gradients(record, ledger)),
        (findings.of_repeated, reused_gradients.repeated_gradients(record, ledger)),
        (findings.of_kept, reused_gradients.kept_gradients(record, ledger)),
    )
    judged: set[int] = set()
    for worded, found in faults:
        for fault in found:
            if not judged & fault.optimizers:
                yield worded(fault)
            judged |= fault.optimizers
