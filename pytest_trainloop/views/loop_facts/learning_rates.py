"""The line "schedule"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.instruments.records.learning_rates import cadence, lrs
from pytest_trainloop.recording.events import SchedulerStep
from pytest_trainloop.views.loop_facts.page import Line
from pytest_trainloop.views.loop_facts.words import marked, numbered, span, two

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.instruments.records.learning_rates import Cadence, GroupLRs
    from pytest_trainloop.runs.projection import Projected
    from pytest_trainloop.views.loop_facts.facts import Facts

COLUMNS = 24
"""Points of the drawn rate."""

BLOCKS = "▁▂▃▄▅▆▇█"

FALLEN = 0.01
"""Part of its peak at which a rate has come to nothing."""

SHOWN = 1_000
"""Calls that are drawn of a schedule that never ends, or twice those to its peak."""


def schedule(facts: Facts) -> Iterator[Line]:
    record = facts.record
    calls = {call.number: call for call in reversed(record.of(SchedulerStep))}
    often = cadence(record)
    every = lrs(record)
    for scheduler in record.schedulers:
        if scheduler.inner and scheduler.number not in calls:
            continue
        first = calls.get(scheduler.number)
        cadenced = often.get(scheduler.number)
        usual = cadenced is not None and cadenced.per == "step"
        called = marked(_called(cadenced), not usual)
        name = facts.optimizer(scheduler.optimizer)
        place = scheduler.place or (first.place if first is not None else None)
        moved = [g for g in every if scheduler.number in g.movers]
        text = f"{scheduler.kind}{f' of {name}' if name else ''}, {called}{_moves(moved)}"
        yield Line(label="schedule", text=text, where=facts.where(place), odd=not usual)
    yield from _ahead(facts)
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


def _called(often: Cadence | None) -> str:
    """How often a scheduler is called."""
    if often is None:
        return "never called"
    if often.per in ("step", "epoch", "micro-batch"):
        return f"1 call per {often.per}"
    return f"{numbered(often.calls, 'call')} in {numbered(often.steps, 'step')}"


def _ahead(facts: Facts) -> Iterator[Line]:
    """Where the schedules go, from a projection without training."""
    from pytest_trainloop.instruments.records.lrs_by_hand import LRsByHand
    from pytest_trainloop.runs.projection import Projections

    found = facts.ask(Projections.of) if facts.record.schedulers else None
    by_hand = facts.ask(LRsByHand.of)
    for one in (*(found.schedulers if found else ()), *(by_hand.projected if by_hand else ())):
        where = facts.where(one.made_at or one.place)
        if one.made_in_fit and one.planned is None:
            text = f"{one.kind} ahead: built in fit by the batches that it is given; give steps= to see where it goes"
            yield Line(label="", text=text, where=where)
            continue
        end, until, odd = end_of(one)
        peak = f"peak {two(max(one.curve.group(one.curve.leading)))} at call {one.curve.peak_at(one.curve.leading):,}"
        plan = f"plan: {one.planned:,} calls" if one.planned is not None else "give steps= to see it against the plan"
        yield Line(label="", text=f"{one.kind} ahead: {peak}, {marked(end, odd)}; {plan}", where=where, odd=odd)
        yield Line(label="", text=_drawn(one.lr, one.curve.leading, one.planned or until), where=where)
    if found and found.why:
        yield Line(label="", text=f"not projected: {found.why}")


def end_of(one: Projected) -> tuple[str, int, bool]:
    """How a schedule ends, the call up to which it is worth drawing, and whether that is unusual."""
    from pytest_trainloop.runs.projection import CYCLIC, turns_at

    curve, group = one.curve, one.curve.leading
    lrs = curve.group(group)
    fallen = FALLEN * max(lrs)
    if one.raises_at is not None:
        early = one.planned is not None and one.planned >= one.raises_at
        return f"raises at call {one.raises_at:,}", one.raises_at - 1, early
    if any(kind in one.kind for kind in CYCLIC):
        return "rises again and again by design", SHOWN, False
    if (turn := turns_at(curve)) is not None:
        return f"lowest at call {turn:,}, and rises again", turn, one.planned is not None and one.planned > turn
    settled = curve.settles
    if settled is not None and lrs[-1] > fallen:
        return f"last change at call {settled:,}", settled, False
    high = [at for at, lr in zip(curve.calls, lrs, strict=True) if lr > fallen]
    if high and high[-1] < curve.end:
        return f"below 1 % of its peak from call {high[-1] + 1:,}", high[-1] + 1, False
    return f"changes on past call {curve.end:,}", max(SHOWN, 2 * curve.peak_at(group)), False


def _drawn(lr: Callable[[int], Sequence[float]], group: int, until: int) -> str:
    """The rate as a row of blocks, over the calls up to ``until``."""
    columns = max(2, min(COLUMNS, until + 1))
    points = [lr(round(n * until / (columns - 1)))[group] for n in range(columns)]
    most = max(points)
    blocks = "".join(BLOCKS[round(p / most * (len(BLOCKS) - 1)) if most > 0 else 0] for p in points)
    return f"rate {two(points[0])} {blocks} {two(points[-1])}   calls 0 to {until:,}"


def _moves(groups: Sequence[GroupLRs]) -> str:
    """What a scheduler did to the rates; a group whose rates equal those of the previous one is left out."""
    moves = dict.fromkeys(span(g.known[0], g.known[-1]) for g in groups if g.known)
    return f"; rate {', '.join(moves)}" if moves else ""


def _by_hand(every: Sequence[GroupLRs], facts: Facts) -> Iterator[Line]:
    """The groups whose rates a line of the loop writes."""
    for group in every:
        if "hand" in group.movers:
            name = facts.optimizer(group.optimizer)
            which = f"group {group.group}{f' of {name}' if name else ''}"
            text = f"rate of {which} written by hand, {span(group.known[0], group.known[-1])}"
            yield Line(label="schedule", text=text)
