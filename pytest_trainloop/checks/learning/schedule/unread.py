"""Rates and options that are written where no optimizer reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import FEWEST, held_in, numbers
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import Step
from pytest_trainloop.records.learning_rates import rates
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Optimizer, Record
    from pytest_trainloop.runs.evidence import Evidence

MEANT = {
    "learning_rate": "lr",
    "learningrate": "lr",
    "lrate": "lr",
    "rate": "lr",
    "wd": "weight_decay",
    "weight_decay_rate": "weight_decay",
    "decay": "weight_decay",
    "l2": "weight_decay",
    "epsilon": "eps",
    "beta": "betas",
    "mom": "momentum",
}
"""Names by which an option of torch's optimizers is known elsewhere."""


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


def option_nobody_reads(evidence: Evidence) -> Iterator[Finding]:
    """A key of a group that its optimizer has no option of, and that is an option's name misspelled, or its other name.

    Torch's optimizers take any key in a group and read only their own.
    """
    record = evidence.run()
    for optimizer in record.optimizers:
        for group, settings in enumerate(optimizer.settings if optimizer.from_torch and optimizer.steps else ()):
            for key, value in settings.items():
                option = _meant(key, optimizer)
                if not option or settings.get(option, _rate(record, optimizer, group, option)) == value:
                    continue
                if _is_used(evidence, key):
                    continue
                held = held_in(record, optimizer, group)
                own = settings.get(option) or _rate(record, optimizer, group, option)
                yield Finding(
                    cause="option_nobody_reads",
                    summary=(
                        f"group {group} of {optimizer.kind} gives {key}={value}, which no optimizer reads: its "
                        f"{option} is {own}"
                    ),
                    measured=f"group {group} holds {some(held)}; {optimizer.kind} reads {some(optimizer.options, 12)}",
                    shown_by=f'torch keeps "{key}" in the group without a word, and no line of the loop reads it',
                    culprits=(f'param_groups[{group}]["{key}"]',),
                    where=record.step_line(),
                    repair=f'"{option}": {value} in this group',
                )


def _rate(record: Record, optimizer: Optimizer, group: int, option: str) -> str:
    first = next((r for r in rates(record) if (r.optimizer, r.group) == (optimizer.index, group)), None)
    return f"{first.known[0]:g}" if option == "lr" and first is not None and first.known else ""


def _meant(key: str, optimizer: Optimizer) -> str:
    """The option that a key is a misspelling or another name of; empty where it is none, or is one itself."""
    if key in optimizer.options or key in ("params", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr"):
        return ""
    plain = key.lower().replace("-", "_")
    known = MEANT.get(plain, plain)
    if known in optimizer.options:
        return known
    return next((o for o in optimizer.options if len(o) >= 5 and 0 < _distance(plain, o) <= 2), "")


def _distance(one: str, other: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour, to make one word of the other."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def _is_used(evidence: Evidence, key: str) -> bool:
    """Whether a line of the loop reads or writes the key, which is the project's own then; unknown counts as such."""
    from pytest_trainloop.tracing.rate_writes import RateWrites

    accesses = evidence.shared(RateWrites.of)
    return not accesses.seen or bool(accesses.reads(key) or accesses.writes(key))
