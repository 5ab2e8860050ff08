"""The learning rate of every group: over the watched run, and projected to the end of the training."""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

from pytest_trainloop.instruments.records.learning_rates import lrs as lrs_of
from pytest_trainloop.views.loop_facts.learning_rates import end_of
from pytest_trainloop.views.loop_facts.words import numbered
from pytest_trainloop.views.pictures.picture import POINTS, Axis, Mark, Picture, curve, scale_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.instruments.records.learning_rates import GroupLRs
    from pytest_trainloop.runs.projection import Projected
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.pictures.picture import Role
    from pytest_trainloop.views.pictures.report_inputs import ReportInputs

RATE = "learning rate"

MOST_SCHEDULES = 3
"""Optimizers whose schedules are drawn to their end."""

MOST_CURVES = 8
"""Curves of different groups: a reader cannot distinguish more."""


def lrs(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The rates as the steps of the watched run read them, where one moves or has a schedule that should move it."""
    every = [group for group in lrs_of(facts.record) if group.known]
    if not any(group.moves for group in every) and not facts.record.schedulers:
        return
    by_lrs: dict[tuple[float, ...], list[GroupLRs]] = {}
    for group in every:
        by_lrs.setdefault(group.values, []).append(group)
    role: Role = "each" if len(by_lrs) > 1 else "own"
    drawn = [
        curve(_name(facts, groups, of=len(every)), range(1, len(values) + 1), values, role, stepped=True)
        for values, groups in list(by_lrs.items())[:MOST_CURVES]
    ]
    if not drawn or max(len(one.x) for one in drawn) < 2:
        return
    first = next((s for s in facts.record.schedulers if s.place is not None), None)
    yield Picture(
        key="rates",
        kind="curves",
        title="Learning rates",
        look="Each group moves as its schedule says, from the first step on; nothing moves a group whose line is flat.",
        of=f"the watched run, {numbered(max(len(one.x) for one in drawn), 'step')}",
        checks=("schedule", "every_param_moves", "update_ratio"),
        where=facts.where(first.place) if first is not None else "",
        y=Axis(title=RATE, scale=scale_of(drawn)),
        curves=tuple(drawn),
        note=f"{MOST_CURVES} of {len(by_lrs)} different rates" if len(by_lrs) > MOST_CURVES else "",
    )


def _name(facts: Facts, groups: Sequence[GroupLRs], *, of: int) -> str:
    """What a curve is called: the optimizer and the groups that have these rates."""
    if len(groups) == of:
        return "all groups" if of > 1 else RATE
    first = groups[0]
    given = facts.measured.groups.get(first.optimizer, [])
    named = given[first.group].name if first.group < len(given) else ""
    optimizer = facts.optimizer(first.optimizer)
    own = " ".join(filter(None, (optimizer, named or f"group {first.group}")))
    return own if len(groups) == 1 else f"{own} and {numbered(len(groups) - 1, 'other')}"


def lrs_ahead(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """Where the schedules go if training goes on to its end; nothing is trained for it."""
    from pytest_trainloop.instruments.records.lrs_by_hand import LRsByHand
    from pytest_trainloop.runs.projection import Projections

    found = facts.ask(Projections.of) if facts.record.schedulers and facts.evidence.repeatable else None
    by_hand = facts.ask(LRsByHand.of) if facts.evidence.repeatable else None
    every = (*(found.schedulers if found else ()), *(by_hand.projected if by_hand else ()))
    for number, one in enumerate(every[:MOST_SCHEDULES]):
        if len(one.curve.calls) > 1 and not (one.made_in_fit and one.planned is None):
            yield _ahead(facts, one, f"rates_ahead_{number}" if number else "rates_ahead")


def _ahead(facts: Facts, one: Projected, key: str) -> Picture:
    from pytest_trainloop.runs.projection import turns_at

    end, until, _ = end_of(one)
    last = min(one.curve.end, max(until, one.planned or 0))
    calls = _points(one, last)
    at = [one.curve.lrs[bisect.bisect_right(one.curve.calls, call) - 1] for call in calls]
    by_lrs: dict[tuple[float, ...], list[int]] = {}
    for group in range(len(at[0])):
        by_lrs.setdefault(tuple(lrs[group] for lrs in at), []).append(group)
    role: Role = "each" if len(by_lrs) > 1 else "own"
    drawn = [
        curve(_groups(groups, by_lrs), calls, values, role, stepped=last <= POINTS)
        for values, groups in list(by_lrs.items())[:MOST_CURVES]
    ]
    marks = []
    if one.planned is not None:
        marks.append(Mark(axis="x", at=one.planned, text=f"the plan ends: {one.planned:,} calls"))
    if one.horizon is not None and one.horizon <= last and one.horizon != one.planned:
        what = "lowest at" if turns_at(one.curve) is not None else "the schedule ends:"
        marks.append(Mark(axis="x", at=one.horizon, text=f"{what} call {one.horizon:,}"))
    return Picture(
        key=key,
        kind="curves",
        title="Learning rates to the end of the training",
        look="The rates come down as the plan of the training ends, neither long before it nor not at all.",
        of=f"{one.kind} stepped on without training: {end}",
        checks=("schedule", "overfit_one_batch:lr_decays_too_early"),
        where=facts.where(one.made_at or one.place),
        x=Axis(title="call of the schedule", unit=f"one a {one.unit}" if one.unit else ""),
        y=Axis(title=RATE),
        curves=tuple(drawn),
        marks=tuple(marks),
        note="" if one.planned is not None else "give steps= or epochs= to see it against the plan",
    )


def _points(one: Projected, last: int) -> list[int]:
    """The calls that are drawn: evenly spaced, with every call at which a rate jumps, as far as there are few."""
    step = max(1, math.ceil(last / (POINTS // 2)))
    calls = set(range(0, last + 1, step)) | {last}
    lrs = one.curve.group(one.curve.leading)
    known = [i for i, call in enumerate(one.curve.calls) if 0 < call <= last]
    jumps = sorted(known, key=lambda i: -abs(lrs[i] - lrs[i - 1]))[: POINTS // 8]
    for i in jumps:
        calls |= {one.curve.calls[i - 1], one.curve.calls[i]}
    return sorted(calls)


def _groups(groups: Sequence[int], by_lrs: dict[tuple[float, ...], list[int]]) -> str:
    if len(by_lrs) == 1:
        return "all groups" if len(groups) > 1 else RATE
    return f"group {groups[0]}" if len(groups) == 1 else f"group {groups[0]} and {numbered(len(groups) - 1, 'other')}"
