"""What ``step_order`` says of each fault. Plain data, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from pytest_trainloop.checks.wiring.consequences import LEARNING, TRAINING
from pytest_trainloop.checks.wiring.step_order.leaks import condition_of
from pytest_trainloop.finding import Finding
from pytest_trainloop.wording import be, count, some, they

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.wiring.step_order.call_order import EarlyScheduler, LateClips
    from pytest_trainloop.checks.wiring.step_order.empty_steps import EmptySteps
    from pytest_trainloop.checks.wiring.step_order.late_backwards import LateBackwards, RefusedBackward
    from pytest_trainloop.checks.wiring.step_order.leaks import Leak
    from pytest_trainloop.checks.wiring.step_order.missing_calls import MissingBackward, MissingStep
    from pytest_trainloop.checks.wiring.step_order.reused_gradients import Kept, Repeated, Stale
    from pytest_trainloop.checks.wiring.step_order.untrained import Untrained
    from pytest_trainloop.checks.wiring.step_order.windows import ClearedInside
    from pytest_trainloop.recording.events import Raised, ScalerCall
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import BackwardOutcome


class _Names(TypedDict):
    culprits: tuple[str, ...]
    kinds: tuple[str, ...]


def _without(*calls: str, parameters: Sequence[str] = ()) -> _Names:
    """The names of a fault that lies in calls that are never made."""
    kinds = ("missing call",) * len(calls) + ("parameter",) * len(parameters)
    return {"culprits": (*calls, *parameters), "kinds": kinds}


def of_missing_backward(found: MissingBackward) -> Finding:
    return Finding(
        cause="backward_missing",
        summary=f"{found.steps} optimizer steps found no gradient: no backward pass ever ran",
        measured=f"0 backward passes, {found.steps} steps, no parameter changed",
        shown_by="no gradient arrived or was assigned, and every parameter is as it was",
        **_without("loss.backward()"),
        where=str(found.first.place),
    )


def of_untrained(found: Untrained) -> Finding:
    many = f"{found.batches} batch{'' if found.batches == 1 else 'es'}"
    if found.swallowed:
        shown = f"the exception was raised {found.times} times inside fit, and never left it"
    elif found.never_reached:
        shown = "this call of backward() stands in the code that ran, and was never reached"
    else:
        shown = "the functions that ran hold no call of backward()" if found.place else ""
    return Finding(
        cause="nothing_trains",
        summary=f"fit trains nothing: no backward pass and no optimizer step in {many}"
        + (f"; it swallows {found.swallowed}" if found.swallowed else ""),
        measured=f"0 backward passes, 0 steps, {many}; no weight and no buffer of the model changed",
        shown_by=shown,
        **_without("loss.backward()", "optimizer.step()"),
        where=str(found.place or ""),
        repair="let the exception out, and mend what raises it" if found.swallowed else "",
    )


def of_step_without_optimizer(found: Untrained) -> Finding:
    return Finding(
        cause="step_missing",
        summary=(
            f"{found.backwards} backward passes made gradients, and no optimizer step was made: no optimizer is given, "
            "and none was seen"
        ),
        measured=f"{found.backwards} backward passes, 0 steps; no weight and no buffer of the model changed",
        shown_by="gradients arrive, no step uses them, and no parameter differs from its start",
        **_without("optimizer.step()", parameters=found.parameters),
        where=str(found.first.place) if found.first else "",
    )


def of_missing_step(found: MissingStep) -> Finding:
    if found.onto_nonfinite >= 2:
        return Finding(
            cause="not_zeroed",
            summary=(
                "a gradient that is not finite is never zeroed: all later ones are added to it, and no step is made"
            ),
            measured=(
                f"{found.onto_nonfinite} of {found.backwards} backward passes add finite gradients to one that is not "
                "finite; 0 steps"
            ),
            shown_by="what stands in .grad before these passes is inf or NaN, and what arrives is not",
            culprits=("zero_grad()", *found.parameters),
            where=str(found.first.place),
            repair=(
                "zero the gradients of a batch that is left out too: zero_grad() before backward(), not after step()"
            ),
            explains=(*TRAINING, "grad_scaler"),
        )
    return Finding(
        cause="step_missing",
        summary=(
            f"{found.backwards} backward passes made gradients, and the {found.kind} that holds the parameters made "
            "no step"
        ),
        measured=f"{found.backwards} backward passes, 0 steps, 0 of {len(found.parameters)} parameters changed",
        shown_by="gradients arrive, no step uses them, and no parameter differs from its start",
        **_without("scaler.step(optimizer)" if found.scaled else "optimizer.step()", parameters=found.parameters),
        where=str(found.first.place),
        repair="call scaler.step(optimizer) and scaler.update() after backward()" if found.scaled else "",
    )


def of_empty_steps(found: EmptySteps) -> Finding:
    """Zeros that something wrote or left, a step that comes first, or gradients that were zeroed before the step."""
    none_of = f"{found.empty} of {found.steps} steps found no gradient"
    measured = f"{none_of}; the gradients of {found.cleared} backward passes were zeroed unused"
    if found.zeros_read_at is not None:
        write = found.overwritten
        by = f"{write.by}()" if write and write.by else "a hook on the gradients"
        return Finding(
            cause="zeroed_before_step",
            summary=f"{by} leaves gradients of exactly 0 between backward() and step(): there is nothing left to use",
            measured=measured,
            shown_by=f"order seen: backward with gradients that are not zero, {by}, step with zeros",
            culprits=(by, *found.parameters),
            where=str(write.place if write else found.zeros_read_at.place),
            repair=(
                "look at what the gradients are multiplied by, and in which dtype: a norm that overflows gives a "
                "factor of 0, and float16 holds nothing below 6e-8"
            ),
        )
    if found.first_step.at < found.backward.at:
        return Finding(
            cause="step_before_backward",
            summary=f"step() runs before backward(): {none_of}",
            measured=measured,
            shown_by=(
                "the first step comes before the first backward, and what backward computes is zeroed before the next "
                "step"
            ),
            culprits=("optimizer.step()", *found.parameters),
            where=str(found.first_step.place),
        )
    by = found.clearing.by if found.clearing else ""
    return Finding(
        cause="zeroed_before_step",
        summary=f"gradients are zeroed between backward() and step(): {none_of}",
        measured=measured,
        shown_by=f"order seen: backward, {by or 'zeroing'}, step",
        culprits=(by or "zero_grad()", *found.parameters),
        where=str(found.clearing.place if found.clearing else found.backward.place),
    )


def of_late_backwards(found: LateBackwards) -> Finding:
    return Finding(
        cause="step_before_backward",
        summary=(
            "step() runs between the forward pass and its backward(): each step uses the gradient of an earlier batch, "
            "computed at older weights"
        ),
        measured=f"{found.late} of {found.backwards} backward passes belong to a forward pass before the last step",
        shown_by="the parameters were stepped after their module's forward call and before the gradient arrived",
        culprits=("optimizer.step()", *found.parameters),
        where=str(found.step.place),
    )


def of_refused_backward(found: RefusedBackward) -> Finding:
    return Finding(
        cause="step_before_backward",
        summary=(
            "step() runs between the forward pass and its backward(): it changes the weights that backward needs, and "
            "torch refuses"
        ),
        measured=(
            f"{found.steps} optimizer steps between the forward pass and its backward; torch raised: "
            f"{found.raised[:120]}"
        ),
        shown_by="order seen: forward, step, backward",
        culprits=("optimizer.step()", *found.parameters),
        where=str(found.step.place),
    )


def of_stale(found: Stale) -> Finding:
    names, wrong = found.parameters, found.cleared_elsewhere
    reason = f"the zero_grad() that runs zeroes something else than {they(names)}" if wrong else "nothing zeroes them"
    return Finding(
        cause="wrong_object_zeroed" if wrong else "not_zeroed",
        summary=f"{some(names)} {be(names)} stepped with the gradients of all earlier batches added in: {reason}",
        measured=f"{found.stale} of {found.steps} steps used gradients that the step before had used already",
        shown_by="what stands in .grad before backward is bit-identical to what the last step used",
        culprits=names,
        where=str(wrong.place if wrong else found.first.place),
    )


def of_repeated(found: Repeated) -> Finding:
    names, two = found.parameters, len(found.optimizers) == 2
    return Finding(
        cause="two_optimizers" if two else "stepped_twice",
        summary=f"{some(names)} {be(names)} stepped twice on the same gradient"
        + (f", by {' and '.join(found.kinds)}" if two else ""),
        measured=f"{found.steps} steps used a gradient that the step before had used",
        shown_by="the gradient is bit-identical, and no backward ran between the two steps",
        culprits=names,
        where=str(found.first.place),
    )


def of_kept(found: Kept) -> Finding:
    return Finding(
        cause="gradient_kept",
        summary=(
            f"{some(found.parameters)} {be(found.parameters)} stepped with the gradient of an earlier batch over and "
            "over"
        ),
        measured=f"{found.steps} steps used what the step before had used",
        shown_by=(
            "the gradient is bit-identical, nothing writes it between the steps, and the backward passes between them "
            "compute others"
        ),
        culprits=found.parameters,
        where=str(found.place),
    )


def of_cleared_inside(found: ClearedInside) -> Finding:
    window, clearing = found.window, found.clearing
    return Finding(
        cause="zeroed_inside_window",
        summary=(
            f"gradients are zeroed inside the accumulation window: {window.cleared} of {window.size} micro-batches are "
            "lost"
        ),
        measured=f"the gradients of {found.cleared} of {found.backwards} backward passes were zeroed before a step",
        shown_by=(
            f"in every window the gradients of {window.cleared} micro-batches are gone when the step reads what is left"
        ),
        culprits=(clearing.by if clearing else "zero_grad()",),
        where=str(clearing.place if clearing else found.first.place),
    )


def of_left_open(record: Record, left: list[BackwardOutcome], backwards: int) -> Finding:
    return Finding(
        cause="window_left_over",
        level="advice",
        summary=(
            f"the last {count(len(left), 'backward pass')} {'was' if len(left) == 1 else 'were'} never stepped: the "
            "window at the end of the data stays open"
        ),
        measured=f"{len(left)} of {backwards} backward passes at the end; {record.items} batches",
        shown_by="their gradients still stand in .grad when fit returns",
        culprits=("optimizer.step()",),
        where=str(left[0].backward.place),
    )


def of_leak(found: Leak) -> Finding:
    condition = condition_of(found.step.place)
    next_one = "call of fit" if found.next_call else "pass over the data"
    left = count(found.left, "micro-batch")
    return Finding(
        cause="leaks_into_next",
        level="advice" if found.loader is None else "fault",
        summary=(
            f"{left} left over at the end of one {next_one} {'is' if found.left == 1 else 'are'} added to the first "
            f"step of the next: it uses {found.used} backward passes, all others {found.window}"
        ),
        measured=(
            f"{found.items} batches in windows of {found.window} leave {found.left}"
            + (f"; the loader has {found.loader} batches" if found.loader else "")
        ),
        shown_by="nothing zeroes or steps them in between, and the window after them is a whole one by itself",
        culprits=("optimizer.step()",),
        where=str(found.first.place),
        change=condition or str(found.step.place),
        repair=(
            "let this condition hold at the last batch too: if (i + 1) % accumulate == 0 or i + 1 == len(batches)"
            if condition
            else ""
        ),
    )


def of_late_clips(found: LateClips) -> Finding:
    by, limit = found.first.by.lstrip("_"), found.first.limit
    return Finding(
        cause="clip_after_step",
        summary=(
            f"gradients are clipped after step() has used them: {found.late} of {found.clips} clips change nothing "
            "that trains"
        ),
        measured=f"limit {'unknown' if limit is None else f'{limit:g}'}, {found.late} clips after the step",
        shown_by=f"order seen: backward, step, {by}",
        culprits=(by,),
        where=str(found.first.place),
        repair="move this line between backward() and step()"
        + (f" (step at line {found.step.place.line})" if found.step else ""),
    )


def of_unstepped_scaler(update: ScalerCall, scaled: int, raised: Raised | None) -> Finding:
    return Finding(
        cause="step_missing",
        summary="the loss is scaled and the scaler updated, and scaler.step(optimizer) is never called: nothing trains",
        measured=f"{count(scaled, 'loss')} scaled, 0 steps",
        shown_by=f"torch raised: {raised.summary if raised else ''}",
        **_without("scaler.step(optimizer)"),
        where=str(update.place),
        repair="scaler.step(optimizer) before this line",
        explains=(*LEARNING, "grad_scaler"),
    )


def of_early_scaler_step(step: ScalerCall, raised: Raised | None) -> Finding:
    return Finding(
        cause="step_before_backward",
        summary="scaler.step() runs before anything was scaled and backpropagated",
        measured="1 scaler step before the first backward pass",
        shown_by=f"torch raised: {raised.summary if raised else ''}",
        culprits=("scaler.step(optimizer)",),
        where=str(step.place),
        repair="order: zero_grad(), forward, scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
        explains=(*LEARNING, "grad_scaler"),
    )


def of_early_scheduler(found: EarlyScheduler) -> Finding:
    return Finding(
        cause="scheduler_before_optimizer",
        summary=(
            "scheduler.step() runs before optimizer.step(): the first learning rate of the schedule is never used and "
            "every other comes one step early"
        ),
        measured=f"{found.steps} scheduler steps, the first before any optimizer step"
        + ("" if found.lr is None else f", which then ran at learning rate {found.lr:.3g}"),
        shown_by=(
            f"order seen in the first iteration: {'backward, ' if found.after_backward else ''}scheduler, optimizer"
        ),
        culprits=(f"{found.first.scheduler}.step()",),
        where=str(found.first.place),
    )
