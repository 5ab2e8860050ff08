"""One scheduler that is called once a step and once a pass as well."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import calls_of
from pytest_trainloop.checks.learning.schedule.uncalled import WholeFit
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.records.learning_rates import called

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import Place, SchedulerStep
    from pytest_trainloop.recording.record import Record, Scheduler
    from pytest_trainloop.runs.evidence import Evidence


def counted_in_two_units(evidence: Evidence) -> Iterator[Finding]:
    """One line calls the scheduler after each step, and another one at the end of each pass, in all passes of a whole
    run. A call that is given its epoch sets the position, and adds nothing to it."""
    record = evidence.run()
    if not any(len(_lines(record, s)) == 2 for s in record.schedulers):
        return
    whole = evidence.shared(WholeFit.of).record
    if whole is None or len(whole.passes) < 2:
        return
    for scheduler in whole.schedulers:
        lines = _lines(whole, scheduler)
        if len(lines) != 2 or not (found := _step_and_pass(whole, scheduler, lines)):
            continue
        often, seldom = found
        steps, passes = len(lines[often]), len(lines[seldom])
        yield Finding(
            cause="counted_in_two_units",
            summary=(
                f"{scheduler.kind} is called once a step and once a pass as well: its count is neither that of the "
                "steps nor that of the passes"
            ),
            measured=f"{steps} calls after {steps} steps, and {passes} calls at the end of {passes} passes",
            shown_by=f"{often.file}:{often.line} and {seldom.file}:{seldom.line} both call {called(scheduler)}",
            culprits=(f"{scheduler.kind}.step()",),
            where=str(often),
        )
        return


def _lines(record: Record, scheduler: Scheduler) -> dict[Place, list[SchedulerStep]]:
    """The calls by the line that makes them; none where one was given a metric or a position."""
    calls = calls_of(record, scheduler.number)
    if scheduler.inner or scheduler.optimizer is None or any(c.metric for c in calls):
        return {}
    found: dict[Place, list[SchedulerStep]] = {}
    for call in calls:
        found.setdefault(call.place, []).append(call)
    return found


def _step_and_pass(
    record: Record, scheduler: Scheduler, lines: dict[Place, list[SchedulerStep]]
) -> tuple[Place, Place] | None:
    """The line that calls it once a step, and the one that calls it once a pass, right after the other one."""
    often, seldom = sorted(lines, key=lambda line: -len(lines[line]))
    steps = [s.at for s in record.innermost_steps() if s.optimizer == scheduler.optimizer]
    backwards = [b for b in record.of(Backward) if b.kind == "backward"]
    ends = list(itertools.accumulate(record.passes))

    def items(positions: Sequence[int]) -> list[int]:
        return [max((b.item for b in backwards if b.at < at), default=0) for at in positions]

    first, last = [c.at for c in lines[often]], [c.at for c in lines[seldom]]
    if items(last) != ends or len(first) != len(steps) or len(steps) < 2 * len(ends):
        return None
    each = all(a < b for a, b in zip(steps, first, strict=True))
    between = all(a < b for a, b in zip(first, steps[1:], strict=False))
    follows = all(max(a for a in first if a < at) > max(s for s in steps if s < at) for at in last)
    return (often, seldom) if each and between and follows else None
