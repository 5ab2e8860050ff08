"""Groups whose rate is 0, or that no schedule reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import FEWEST, calls_of, held_in, line_of
from pytest_trainloop.checks.learning.schedule.rate_causes import RATE_CAUSES
from pytest_trainloop.finding import Finding, code_of
from pytest_trainloop.recording.events import SchedulerStep
from pytest_trainloop.records.learning_rates import rates
from pytest_trainloop.registry import finding_maker
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.record import Optimizer, Record
    from pytest_trainloop.records.learning_rates import GroupRates
    from pytest_trainloop.runs.evidence import Evidence


found = finding_maker(RATE_CAUSES)


def groups(evidence: Evidence) -> Iterator[Finding]:
    record = evidence.run()
    if (refused := _refused(record)) is not None:
        yield refused
    for optimizer in record.optimizers:
        own = [r for r in rates(record) if r.optimizer == optimizer.index]
        if len(own) == 0 or len(own[0].values) < FEWEST:
            continue
        yield from _at_zero(evidence, record, optimizer, own)
        yield from _unscheduled(evidence, record, optimizer, own)
        yield from _made_equal(evidence, record, optimizer, own)


def _at_zero(evidence: Evidence, record: Record, optimizer: Optimizer, own: Sequence[GroupRates]) -> Iterator[Finding]:
    """A group at rate 0 beside others that learn; or all of them at 0 for the first steps."""
    zero = [g for g in own if g.zero and _learns(record, optimizer, g.group)]
    if zero and any(max(g.known, default=0) > 0 for g in own):
        names = [name for g in zero for name in held_in(record, optimizer, g.group)]
        others = next(g for g in own if max(g.known, default=0) > 0)
        from pytest_trainloop.tracing.rate_writes import RateWrites

        writes = evidence.shared(RateWrites.of)
        line = writes.line(optimizer=optimizer.index, group=others.group)
        moved = f"; this line writes the rate of group {others.group} of {len(own)}" if line else ""
        yield Finding(
            cause="group_at_zero",
            level="advice",
            summary=(
                f"group {zero[0].group} of {len(own)} has a learning rate of 0 at all {len(zero[0].values)} steps: "
                f"{some(names)} do not learn"
            ),
            measured=f"gradients that are not 0 arrive; group {others.group} learns at {max(others.known):g}{moved}",
            shown_by="frozen= of TrainLoop does not name them",
            culprits=tuple(names[:8]),
            where=line or record.step_line(),
            change=writes.line(optimizer=optimizer.index, group=zero[0].group) or line,
        )
    elif all(g.known[:2] == (0.0, 0.0) for g in own) and any(_learns(record, optimizer, g.group) for g in own):
        count = min(next((n for n, v in enumerate(g.known) if v), len(g.known)) for g in own)
        yield Finding(
            cause="zero_for_steps",
            level="advice",
            summary=f"the learning rate is 0 at the first {count} steps in every group of {optimizer.kind}",
            measured=f"rates of the first steps: {', '.join(f'{v:g}' for v in own[0].known[:6])}",
            shown_by=f"{optimizer.kind} makes {count} steps that change no weight",
            culprits=("lr",),
            kinds=("attribute",),
            where=record.step_line(),
        )


def _unscheduled(
    evidence: Evidence, record: Record, optimizer: Optimizer, own: Sequence[GroupRates]
) -> Iterator[Finding]:
    """Groups that keep one rate while the others' are moved."""
    still = [g for g in own if g.constant and g.known[0] > 0 and _learns(record, optimizer, g.group)]
    moving = [g for g in own if g.moves]
    if not still or not moving:
        return
    if (late := _late(record, optimizer, still, moving)) is not None:
        yield late
    elif {m for g in moving for m in g.movers} == {"hand"}:
        yield from list(_late_by_hand(evidence, record, optimizer, still, moving)) or _by_index(
            evidence, record, optimizer, still, moving
        )


def _late(
    record: Record, optimizer: Optimizer, still: Sequence[GroupRates], moving: Sequence[GroupRates]
) -> Finding | None:
    """A group that was added after the scheduler was built, which moves all others."""
    for scheduler in record.schedulers:
        if scheduler.optimizer != optimizer.index or not scheduler.calls or scheduler.inner:
            continue
        late = [g for g in still if g.group >= scheduler.groups]
        calls = [c for c in calls_of(record, scheduler.number) if c.before != c.after]
        known = sum(g.group < scheduler.groups for g in moving) == scheduler.groups
        if not late or not known or len(calls) < FEWEST:
            continue
        group = late[0]
        own_rate = group.known[0] not in {g.known[0] for g in moving}
        names = held_in(record, optimizer, group.group)
        return Finding(
            cause="group_without_schedule",
            level="advice" if own_rate else "fault",
            summary=(
                f"group {group.group} was added after {scheduler.kind} was built, which moves only the first "
                f"{scheduler.groups}: {some(names)} stay at {group.known[0]:g}"
            ),
            measured=(
                f"{len(calls)} calls move group 0 from {moving[0].known[0]:g} to {moving[0].known[-1]:g}; group "
                f"{group.group} is at {group.known[0]:g} in all {len(group.known)} steps"
            ),
            shown_by="a scheduler knows the groups that its optimizer has when it is built, and leaves others alone",
            culprits=tuple(names[:8]),
            where=str(calls[0].place),
            change=line_of(scheduler),
        )
    return None


def _late_by_hand(
    evidence: Evidence,
    record: Record,
    optimizer: Optimizer,
    still: Sequence[GroupRates],
    moving: Sequence[GroupRates],
) -> Iterator[Finding]:
    """A group that was added within the run, while a line writes the rates of all before it at each step.

    It was given its own rate, or its optimizer's: whether it is to keep it no record tells.
    """
    late = [g for g in still if len(g.known) < len(g.values)]
    before = [g for g in moving if len(g.known) == len(g.values)]
    if not late or not before or len(late[0].known) < FEWEST or len(before) + len(late) != late[0].of:
        return
    group, other = late[0], before[0]
    since = other.values[-len(group.known) :]
    if len(set(since)) < len(since):
        return
    from pytest_trainloop.tracing.rate_writes import RateWrites

    names = held_in(record, optimizer, group.group)
    line = evidence.shared(RateWrites.of).line(optimizer=optimizer.index, group=other.group)
    yield Finding(
        cause="group_without_schedule",
        level="advice",
        summary=(
            f"group {group.group} was added within the run, and a line writes the rates of the groups before it only: "
            f"{some(names)} stay at {group.known[0]:g}"
        ),
        measured=(
            f"group {other.group} goes from {since[0]:g} to {since[-1]:g} in the {len(since)} steps since; group "
            f"{group.group} is at {group.known[0]:g} in all of them"
        ),
        shown_by="the rates of all groups before it change from each step to the next",
        culprits=tuple(names[:8]),
        where=line or record.step_line(),
        change=line,
    )


def _refused(record: Record) -> Finding | None:
    """The same where torch raises: from 2.13 on most schedulers count the groups."""
    call = next((c for c in reversed(record.of(SchedulerStep)) if not c.until), None)
    if call is None or record.raised is None or record.raised.kind != "ValueError":
        return None
    scheduler = record.schedulers[call.number]
    if not scheduler.groups < len(call.before) or "zip()" not in record.raised.message:
        return None
    late = record.optimizers[scheduler.optimizer or 0]
    names = held_in(record, late, scheduler.groups)
    return Finding(
        cause="group_without_schedule",
        summary=(
            f"group {scheduler.groups} was added after {scheduler.kind} was built, which knows {scheduler.groups} of "
            f"{len(call.before)} groups and raises"
        ),
        measured=f"{record.raised.summary}; group {scheduler.groups} holds {some(names)}",
        shown_by="a scheduler knows the groups that its optimizer has when it is built",
        culprits=tuple(names[:8]),
        where=str(call.place),
        change=line_of(scheduler),
    )


def _by_index(
    evidence: Evidence,
    record: Record,
    optimizer: Optimizer,
    still: Sequence[GroupRates],
    moving: Sequence[GroupRates],
) -> Iterator[Finding]:
    """A hand-written rate that reaches one group of several.

    Groups that differ in nothing but their weight decay, and begin at one rate, are one schedule's: a fault where the
    line names the group by its index. Else some groups may keep their rate on purpose.
    """
    from pytest_trainloop.tracing.rate_writes import RateWrites

    line = evidence.shared(RateWrites.of).line(optimizer=optimizer.index, group=moving[0].group)
    alike = all(_settings(optimizer, g.group) == _settings(optimizer, moving[0].group) for g in still)
    begins = {g.known[0] for g in still} == {_given_rate(optimizer, moving[0])}
    named = "param_groups[" in code_of(line)
    if not named:
        return
    names = [name for g in still for name in held_in(record, optimizer, g.group)]
    yield Finding(
        cause="one_group_scheduled",
        level="fault" if alike and begins and len(moving) == 1 else "advice",
        summary=(
            f"the rate is written to group {moving[0].group} of {moving[0].of} only: {some(names)} stay at "
            f"{still[0].known[0]:g}"
        ),
        measured=(
            f"group {moving[0].group} goes from {moving[0].known[0]:g} to {moving[0].known[-1]:g} in "
            f"{len(moving[0].known)} steps; group {still[0].group} does not move"
        ),
        shown_by="no scheduler moves a rate, and the line that does names one group by its index",
        culprits=tuple(names[:8]),
        where=line,
        change=line,
    )


def _made_equal(
    evidence: Evidence, record: Record, optimizer: Optimizer, own: Sequence[GroupRates]
) -> Iterator[Finding]:
    """Groups that were built with rates of their own, and have one rate at every step."""
    learning = [g for g in own if g.group < len(optimizer.first_lrs) and _learns(record, optimizer, g.group)]
    given = sorted({_given_rate(optimizer, g) for g in learning})
    # a rate of 0 freezes a group until a line sets it (odd: group_begins_at_zero); a line may come after the first step
    if len(given) < 2 or given[0] <= 0 or len({g.values[1:] for g in learning}) > 1:
        return
    from pytest_trainloop.tracing.rate_writes import RateWrites

    moved = next((g for g in learning if g.values[1] != _given_rate(optimizer, g)), learning[0])
    line = evidence.shared(RateWrites.of).line(optimizer=optimizer.index, group=moved.group)
    if line:
        facts = {
            "given": " and ".join(f"{rate:g}" for rate in given),
            "groups": len(learning),
            "rate": moved.values[1],
        }
        names = [name for g in learning for name in held_in(record, optimizer, g.group)]
        yield found("group_rates_made_equal", line, names[:8], level="advice", steps=len(moved.values), **facts)


def _given_rate(optimizer: Optimizer, group: GroupRates) -> float:
    """The rate that a group was given, before a line moved it."""
    built = optimizer.first_lrs
    return built[group.group] if group.group < len(built) else group.known[0]


def _settings(optimizer: Optimizer, group: int) -> dict[str, str]:
    known = optimizer.settings[group] if group < len(optimizer.settings) else {}
    return {name: text for name, text in known.items() if name != "weight_decay"}


def _learns(record: Record, optimizer: Optimizer, group: int) -> bool:
    """Whether a gradient that is not 0 arrives at the group, and no declaration freezes it."""
    held = [p for p, g in zip(optimizer.parameters, optimizer.groups, strict=True) if g == group]
    live = [p for p in held if record.reached(p) and record.parameters[p].trainable]
    return any(not record.declared_frozen(record.name(p)) for p in live)
