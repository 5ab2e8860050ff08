"""What drives which rate: schedulers and the optimizers that they move."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import SchedulerStep
from pytest_trainloop.records.learning_rates import called, rates
from pytest_trainloop.wording import module_of, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.record import Optimizer, Record, Scheduler

FEWEST = 3
"""Steps, or calls, that make a rule of what is seen."""


WARM_UPS = ("LinearLR", "ConstantLR")
"""Schedulers of which two on one optimizer are a warm-up and a decay."""


def calls_of(record: Record, number: int) -> list[SchedulerStep]:
    """The calls of a scheduler that came to their end, in order."""
    return [c for c in record.of(SchedulerStep) if c.number == number and c.until]


def numbers(values: Sequence[float]) -> str:
    """Rates in a sentence, each once: "0.1, 0.01"."""
    return some(list(dict.fromkeys(f"{value:g}" for value in values)))


def held_in(record: Record, optimizer: Optimizer, group: int) -> list[str]:
    """The names of the parameters of a group."""
    return [record.name(p) for p, g in zip(optimizer.parameters, optimizer.groups, strict=True) if g == group]


def whose(record: Record, optimizer: Optimizer) -> str:
    """An optimizer in a sentence, by its class and the module that it holds: "the Adam of critic"."""
    names = record.names(set(optimizer.parameters))
    return f"the {optimizer.kind} of {module_of(names) or some(names)}"


def line_of(scheduler: Scheduler) -> str:
    return "" if scheduler.place is None else str(scheduler.place)


def drives_another(record: Record) -> Iterator[Finding]:
    """Schedulers that move the rates of an optimizer which another one has replaced.

    Not those of a rate calculator, whose values are written to the groups that step, nor those of a wrapper's, which
    shares the dicts.
    """
    for scheduler in record.schedulers:
        calls = [c for c in calls_of(record, scheduler.number) if c.before != c.after]
        if scheduler.optimizer is None or not calls:
            continue
        left = record.optimizers[scheduler.optimizer]
        replaced = (_replaced(record, left, other, calls) for other in record.optimizers if other is not left)
        yield from itertools.islice(filter(None, replaced), 1)


def _replaced(record: Record, left: Optimizer, other: Optimizer, calls: Sequence[SchedulerStep]) -> Finding | None:
    shared = set(left.parameters) & set(other.parameters)
    groups = [r for r in rates(record) if r.optimizer == other.index]
    if not groups or not shared or set(left.dicts) & set(other.dicts):
        return None
    since = groups[0].at[0]
    goes_on = any(s.optimizer == left.index and s.at > since for s in record.innermost_steps())
    moved = [c for c in calls if c.at > since]
    held = all(g.constant for g in groups) and len(groups[0].values) >= FEWEST
    if goes_on or not moved or not held:
        return None
    name = calls[0].scheduler
    made = "makes no step" if not left.steps else f"makes no step after its first {left.steps}"
    return Finding(
        cause="drives_another",
        summary=(
            f"{name} moves the learning rates of an optimizer that {made}; the {other.kind} that steps stays at "
            f"{numbers([v for g in groups for v in g.known])}"
        ),
        measured=(
            f"{len(moved)} calls move its rate from {moved[0].before[0]:g} to {moved[-1].after[0]:g}; the other "
            f"optimizer makes {other.steps} steps at a constant {numbers([v for g in groups for v in g.known])}"
        ),
        shown_by=f"both optimizers hold {some(record.names(shared))}",
        culprits=(f"{name}.step()",),
        where=str(moved[0].place),
        change=line_of(record.schedulers[calls[0].number]),
    )


def two_on_one(record: Record) -> Iterator[Finding]:
    """Two schedulers of one kind on one optimizer, while an optimizer that steps has none."""
    stepping = [o for o in record.optimizers if o.steps]
    driven = {s.optimizer for s in record.schedulers if not s.inner}
    without = [o for o in stepping if o.index not in driven and _never_moves(record, o)]
    outer = [s for s in record.schedulers if s.calls and not s.inner and s.optimizer is not None]
    for one, other in itertools.combinations(outer, 2):
        if one.optimizer != other.optimizer or one.kind != other.kind or not without:
            continue
        if not _at_one_time(record, one, other):
            continue
        equal = _comparable(one) == _comparable(other)
        if not equal and one.kind in WARM_UPS:
            continue  # a warm-up times a decay
        place = next((c.place for c in calls_of(record, other.number)), None)
        left = without[0]
        yield Finding(
            cause="two_on_one",
            level="fault" if equal else "advice",
            summary=(
                f"two {one.kind} drive {whose(record, record.optimizers[one.optimizer or 0])}, and "
                f"{whose(record, left)} has no schedule"
            ),
            measured=(
                f"both have {'equal' if equal else 'different'} settings; {whose(record, left)} makes {left.steps} "
                f"steps at a constant {_rates(record, left)}"
            ),
            shown_by=f"{called(one)} and {called(other)} are both called, {one.calls} and {other.calls} times",
            culprits=(f"{one.kind}.step()",),
            where="" if place is None else str(place),
            change=line_of(other),
            repair=f"build the second {one.kind} on {whose(record, left)}",
        )
        return


def _never_moves(record: Record, optimizer: Optimizer) -> bool:
    groups = [r for r in rates(record) if r.optimizer == optimizer.index]
    return bool(groups) and not any(g.moves for g in groups)


def _rates(record: Record, optimizer: Optimizer) -> str:
    return numbers([v for r in rates(record) if r.optimizer == optimizer.index for v in r.known])


def _at_one_time(record: Record, one: Scheduler, other: Scheduler) -> bool:
    """Whether calls of the two alternate: stages that follow each other may have one schedule each."""
    first, second = calls_of(record, one.number), calls_of(record, other.number)
    return bool(first and second) and first[0].at < second[-1].at and second[0].at < first[-1].at


def _comparable(scheduler: Scheduler) -> dict[str, str]:
    """The settings but for the rates that the optimizer had, which an earlier scheduler may have moved."""
    return {name: text for name, text in scheduler.settings.items() if name != "base_lrs"}


def called_twice(record: Record) -> Iterator[Finding]:
    """One scheduler that two lines call for each optimizer step."""
    for scheduler in record.schedulers:
        calls = calls_of(record, scheduler.number)
        steps = [s.at for s in record.innermost_steps() if s.optimizer == scheduler.optimizer]
        windows = [[c for c in calls if a < c.at < b] for a, b in itertools.pairwise(steps)]
        if scheduler.plateau or len(windows) < FEWEST:
            continue
        lines = {tuple(dict.fromkeys(c.place for c in window)) for window in windows}
        if len(lines) != 1 or any(len(window) != 2 for window in windows) or len(next(iter(lines))) != 2:
            continue
        first, second = next(iter(lines))
        place = scheduler.place
        yield Finding(
            cause="called_twice",
            summary=f"{scheduler.kind} is called twice for each optimizer step, by two lines: its schedule runs double",
            measured=f"2 calls between each two of {len(steps)} steps: {len(calls)} in all",
            shown_by=f"{first.file}:{first.line} and {second.file}:{second.line} both call the "
            f"{scheduler.kind}" + (f" built at {place.file}:{place.line}" if place is not None else ""),
            culprits=(f"{scheduler.kind}.step()",),
            where=str(second),
        )
