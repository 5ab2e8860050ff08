"""The line "schedule"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.cards.page import Line
from pytest_trainloop.cards.words import marked, span, two
from pytest_trainloop.recording.events import SchedulerStep
from pytest_trainloop.records.learning_rates import cadence, rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.cards.facts import Facts
    from pytest_trainloop.records.learning_rates import GroupRates


def schedule(facts: Facts) -> Iterator[Line]:
    record = facts.record
    calls = {call.number: call for call in reversed(record.of(SchedulerStep))}
    often = cadence(record)
    every = rates(record)
    for scheduler in record.schedulers:
        if scheduler.inner and scheduler.number not in calls:
            continue
        first = calls.get(scheduler.number)
        cadenced = often.get(scheduler.number)
        usual = cadenced is not None and cadenced.per == "step"
        told = marked("never called" if cadenced is None else str(cadenced), not usual)
        name = facts.optimizer(scheduler.optimizer)
        place = scheduler.place or (first.place if first is not None else None)
        moved = [g for g in every if scheduler.number in g.movers]
        text = f"{scheduler.kind}{f' of {name}' if name else ''}, {told}{_moves(moved)}"
        yield Line(label="schedule", text=text, where=facts.where(place), odd=not usual)
    yield from _by_hand(every, facts)
    if not record.schedulers and not any("hand" in g.movers for g in every):
        yield Line(
            label="schedule", text="none: every rate is constant" if every else "none seen: no optimizer stepped"
        )
    elif any(g.moves for g in every):
        for group in every:
            if not group.moves and group.known:
                name = facts.optimizer(group.optimizer)
                still = f"group {group.group}{f' of {name}' if name else ''} stays at {two(group.known[0])} *"
                yield Line(label="", text=still, odd=True)


def _moves(groups: Sequence[GroupRates]) -> str:
    """What a scheduler did to the rates; a group whose rates are those of the one before is not told again."""
    told = dict.fromkeys(span(g.known[0], g.known[-1]) for g in groups if g.known)
    return f"; rate {', '.join(told)}" if told else ""


def _by_hand(every: Sequence[GroupRates], facts: Facts) -> Iterator[Line]:
    """The groups whose rates a line of the loop writes."""
    for group in every:
        if "hand" in group.movers:
            name = facts.optimizer(group.optimizer)
            which = f"group {group.group}{f' of {name}' if name else ''}"
            text = f"rate of {which} written by hand, {span(group.known[0], group.known[-1])}"
            yield Line(label="schedule", text=text)
