"""The order of calls around a step: clip, scheduler, a scaler that never steps. Plain data, no torch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import GradWrite, ScalerCall, SchedulerStep, Site, Step
from pytest_trainloop.records.clips import clips_by_site, comes_after_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record


_LEARNING = ("overfit_one_batch", "update_ratio")


def call_order(record: Record) -> Iterator[Finding]:
    """Faults of call order, each at least twice in the run."""
    yield from _clips(record)
    yield from _scaler_order(record)
    yield from _schedulers(record)


def _clips(record: Record) -> Iterator[Finding]:
    """Clips that come after the step."""
    for clips in clips_by_site(record):
        after = [c for c in clips if comes_after_step(record, c)]
        if len(after) >= 2 and 2 * len(after) > len(clips):
            yield _clip_after_step(record, clips, after)


def _clip_after_step(record: Record, clips: list[GradWrite], after: list[GradWrite]) -> Finding:
    step = next((s for s in record.of(Step) if s.until and s.at < after[0].at), None)
    return Finding(
        cause="clip_after_step",
        summary=(
            f"gradients are clipped after step() has used them: {len(after)} of {len(clips)} clips change nothing "
            "that trains"
        ),
        measured=f"limit {_limit(after[0])}, {len(after)} clips after the step",
        shown_by=f"order seen: backward, step, {after[0].by.lstrip('_')}",
        culprits=(after[0].by.lstrip("_"),),
        where=str(after[0].place),
        repair=f"clip between backward() and step(){f' (step at line {step.place.line})' if step else ''}",
        explains=("finite", *_LEARNING),
    )


def _limit(clip: GradWrite) -> str:
    return "unknown" if clip.limit is None else f"{clip.limit:g}"


def _scaler_order(record: Record) -> Iterator[Finding]:
    """Scalers that torch refuses to go on with: updated without a step, or stepped before anything was scaled."""
    calls = record.scaler_calls()
    if record.raised is None or not calls:
        return
    whats = [c.what for c in calls]
    if whats[-1] == "update" and "step" not in whats and "scale" in whats and not record.steps:
        yield Finding(
            cause="step_missing",
            summary=(
                "the loss is scaled and the scaler updated, and scaler.step(optimizer) is never called: nothing trains"
            ),
            measured=f"{whats.count('scale')} losses scaled, 0 steps",
            shown_by=f"torch raised: {record.raised.summary}",
            culprits=("scaler.step(optimizer)",),
            where=str(calls[-1].place),
            repair="call scaler.step(optimizer) between backward() and scaler.update()",
            explains=("grad_scaler", *_LEARNING),
        )
    elif whats == ["step"] and not record.backwards():
        yield Finding(
            cause="step_before_backward",
            summary="scaler.step() runs before anything was scaled and backpropagated",
            measured="1 scaler step before the first backward pass",
            shown_by=f"torch raised: {record.raised.summary}",
            culprits=("scaler.step(optimizer)",),
            where=str(calls[0].place),
            repair=(
                "order: zero_grad(), forward, scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"
            ),
            explains=("grad_scaler", *_LEARNING),
        )


def _schedulers(record: Record) -> Iterator[Finding]:
    """Schedulers that come before the optimizer in the very first iteration, and go on from the same line.

    A scheduler stepped before the loop (to leave a rate of 0, or to catch up with a resumed run) is not followed by
    another step of the same line once
    optimizers step; one stepped once for each micro-batch comes more than once before the first step; where the first
    batch was skipped openly, a scheduler step still follows the last optimizer step; a step that a
    gradient scaler skipped counts as tried.
    """
    tried = [e.at for e in record.events if _tries(e)]
    if not tried:
        return
    for steps in _by_site(record).values():
        early = [s for s in steps if s.at < tried[0]]
        by_batch = steps[-1].at < tried[-1]
        by_epoch = len(steps) > 1 and sum(early[0].at < at < steps[1].at for at in tried) > 1 if early else False
        if len(early) == 1 and len(steps) > 1 and (by_batch or by_epoch):
            yield _scheduler_first(record, steps, early[0])


def _by_site(record: Record) -> dict[Site, list[SchedulerStep]]:
    by_site: dict[Site, list[SchedulerStep]] = defaultdict(list)
    for step in record.of(SchedulerStep):
        if not step.metric:
            by_site[step.site].append(step)
    return by_site


def _tries(event: object) -> bool:
    return isinstance(event, Step) or (isinstance(event, ScalerCall) and event.what == "step")


def _scheduler_first(record: Record, steps: list[SchedulerStep], early: SchedulerStep) -> Finding:
    rates = [s.rates[0] for s in record.of(Step) if s.rates][:1]
    backward = any(b.at < early.at for b in record.backwards())
    return Finding(
        cause="scheduler_before_optimizer",
        summary=(
            "scheduler.step() runs before optimizer.step(): the first rate of the schedule is never used and every "
            "other comes one step early"
        ),
        measured=f"{len(steps)} scheduler steps, the first before any optimizer step"
        + (f", which then ran at rate {rates[0]:.3g}" if rates else ""),
        shown_by=f"order seen in the first iteration: {'backward, ' if backward else ''}scheduler, optimizer",
        culprits=(f"{steps[0].scheduler}.step()",),
        where=str(early.place),
        repair="call optimizer.step() first, then scheduler.step()",
    )
