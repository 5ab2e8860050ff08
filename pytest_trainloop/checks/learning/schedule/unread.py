"""Rates that are written where no optimizer reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import FEWEST, numbers
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import Step
from pytest_trainloop.records.learning_rates import rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.runs.evidence import Evidence


def rate_nobody_reads(evidence: Evidence) -> Iterator[Finding]:
    """A number called a rate that takes new values while the rate of every group stays as it is.

    One that is logged beside a moving rate is not meant to be read.
    """
    record = evidence.run()
    for optimizer in record.optimizers:
        steps = [s for s in record.of(Step) if s.optimizer == optimizer.index and not s.nested]
        groups = [r for r in rates(record) if r.optimizer == optimizer.index]
        if not optimizer.from_torch or len(steps) < FEWEST or not groups or any(g.moves for g in groups):
            continue
        for name in dict.fromkeys(name for step in steps for name in step.named_rates):
            values = [max(step.named_rates[name]) for step in steps if name in step.named_rates]
            if len(set(values)) < FEWEST:
                continue
            from pytest_trainloop.tracing.rate_writes import RateWrites

            key = name.partition('"')[2].rpartition('"')[0]
            line = evidence.shared(RateWrites.of).line(key, optimizer=optimizer.index) if "group" in name else ""
            yield Finding(
                cause="rate_nobody_reads",
                summary=(
                    f'{name} changes with the steps and no step reads it: group["lr"] stays at '
                    f"{numbers(groups[0].known)}"
                ),
                measured=f"{len(set(values))} values in {len(steps)} steps, {values[0]:g} to {values[-1]:g}",
                shown_by=f'torch\'s {optimizer.kind} reads group["lr"], which is the same at every step in every group',
                culprits=(name,),
                where=line or record.step_line(),
                change=line,
            )
            break
