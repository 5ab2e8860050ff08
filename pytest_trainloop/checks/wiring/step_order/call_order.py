"""The order of clips, schedulers and scaler calls around a step. Plain data, no torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import GradWrite, ScalerCall, SchedulerStep, Site, Step
from pytest_trainloop.records.clips import clips_by_site, comes_after_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record


@dataclass(frozen=True, slots=True)
class LateClips:
    """Clips on one line that come after the step."""

    first: GradWrite
    late: int
    clips: int
    """All clips on that line."""
    step: Step | None
    """The first step that ends before the first late clip."""


@dataclass(frozen=True, slots=True)
class EarlyScheduler:
    """A scheduler that steps before the optimizer in the first iteration."""

    first: SchedulerStep
    steps: int
    """All scheduler steps on that line."""
    lr: float | None
    """The learning rate of the first optimizer step."""
    after_backward: bool


def late_clips(record: Record) -> Iterator[LateClips]:
    """Lines most of whose clips come after the step, at least twice.

    Where two networks are clipped before the step of either, each is clipped in time as well, from another place.
    """
    lines = [(clips, [c for c in clips if comes_after_step(record, c)]) for clips in clips_by_site(record)]
    for clips, late in lines:
        in_time = {i for all_of, after in lines if not after for c in all_of for i in c.parameters}
        if len(late) >= 2 and 2 * len(late) > len(clips) and not set(late[0].parameters) <= in_time:
            step = next((s for s in record.of(Step) if s.until and s.at < late[0].at), None)
            yield LateClips(late[0], len(late), len(clips), step)


def unstepped_scaler(record: Record) -> ScalerCall | None:
    """The update that torch refuses, of a scaler that scales losses and never steps."""
    calls = record.scaler_calls()
    whats = [c.what for c in calls]
    unstepped = whats[-1:] == ["update"] and "scale" in whats and "step" not in whats and not record.steps
    return calls[-1] if unstepped and record.raised is not None else None


def early_scaler_step(record: Record) -> ScalerCall | None:
    """The step that torch refuses, of a scaler that steps before anything was scaled and backpropagated."""
    calls = record.scaler_calls()
    early = [c.what for c in calls] == ["step"] and not record.backwards()
    return calls[0] if early and record.raised is not None else None


def early_schedulers(record: Record) -> Iterator[EarlyScheduler]:
    """Schedulers that come before the optimizer in the very first iteration, and go on from the same line.

    A scheduler stepped before the loop (to leave a learning rate of 0, or to catch up with a resumed run) is followed
    by no other step of the same line once optimizers step. One stepped for each micro-batch comes more than once before
    the first step. Where the first batch was skipped openly, a scheduler step still follows the last optimizer step.
    A step that a gradient scaler skipped counts as tried.
    """
    tried = [e.at for e in record.events if isinstance(e, Step) or (isinstance(e, ScalerCall) and e.what == "step")]
    by_site: dict[Site, list[SchedulerStep]] = defaultdict(list)
    for scheduled in record.of(SchedulerStep):
        if not scheduled.metric:
            by_site[scheduled.site].append(scheduled)
    for steps in by_site.values() if tried else ():
        early = [s for s in steps if s.at < tried[0]]
        if len(early) != 1 or len(steps) == 1:
            continue
        by_batch = steps[-1].at < tried[-1]
        by_epoch = sum(early[0].at < at < steps[1].at for at in tried) > 1
        if by_batch or by_epoch:
            yield EarlyScheduler(
                first=early[0],
                steps=len(steps),
                lr=next((s.lrs[0] for s in record.of(Step) if s.lrs), None),
                after_backward=any(b.at < early[0].at for b in record.backwards()),
            )
