"""The rate of each group at each step of the watched run: who wrote it, whether a step read it, and where it is 0."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.learning.schedule.calls import (
    FEWEST,
    about,
    calls_of,
    groups_of,
    line_of,
    loop_around,
    numbers,
    steps_of,
)
from pytest_trainloop.checks.learning.schedule.causes import found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import code_of
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.records.lrs_by_hand import LRsByHand
from pytest_trainloop.instruments.tracing.definitions import assigned_value, key_written
from pytest_trainloop.instruments.tracing.lr_writes import LRWrites
from pytest_trainloop.recording.events import SchedulerStep, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.records.learning_rates import GroupLRs
    from pytest_trainloop.recording.record import Optimizer, Record, Scheduler
    from pytest_trainloop.runs.evidence import Evidence

ABSOLUTE = ("LambdaLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts")
"""Torch's schedulers that compute each rate from the base rate and the number of calls: whatever another scheduler did
in between is lost."""

ONWARD = {"StepLR", "MultiStepLR", "ExponentialLR", "ConstantLR", "LinearLR", "PolynomialLR"}
ONWARD |= {"CosineAnnealingLR", "MultiplicativeLR"}
"""Torch's schedulers that compute each rate from the last one."""


def held_in(record: Record, optimizer: Optimizer, *groups: int) -> list[str]:
    """The names of the parameters of some groups."""
    held = list(zip(optimizer.parameters, optimizer.groups, strict=True))
    return [record.name(p) for number in groups for p, g in held if g == number]


def learns(record: Record, optimizer: Optimizer, group: int) -> bool:
    """Whether a gradient that is not 0 arrives at the group, and no declaration freezes it."""
    held = [p for p, g in zip(optimizer.parameters, optimizer.groups, strict=True) if g == group]
    live = [p for p in held if record.reached(p) and record.parameters[p].trainable]
    return any(not record.declared_frozen(record.name(p)) for p in live)


def overwritten(evidence: Evidence) -> Iterator[Finding]:
    """Schedules whose rates no step uses: written over by a line of the loop, or by another scheduler."""
    record = evidence.run()
    outer = [s for s in record.schedulers if s.calls and not s.inner and s.optimizer is not None]
    for scheduler in outer:
        calls, groups = calls_of(record, scheduler), groups_of(record, scheduler.optimizer)
        back = [g for g in groups if _is_written_back(evidence, g, calls)]
        if back and not any(g.moves for g in groups):
            group = back[0]
            line = evidence.shared(LRWrites.of).line(optimizer=group.optimizer, group=group.group)
            given = dict.fromkeys(f"{c.after[group.group]:g}" for c in calls if c.before != c.after)
            facts: dict[str, Any] = {"change": line, "lr": group.known[0], "group": group.group, "calls": len(calls)}
            facts |= {"given": some(list(given)), "steps": len(group.values)}
            yield about(scheduler, "schedule_overwritten", line or calls[0], **facts)
            continue
        for other in outer:
            same = other is not scheduler and other.optimizer == scheduler.optimizer
            if same and _undoes(record, other, scheduler):
                moved = [c for c in calls if c.before != c.after]
                later = next(c for c in calls_of(record, other) if c.at > moved[0].at)
                repair = (
                    "SequentialLR for one after the other; to multiply both, one LambdaLR over the product instead of "
                )
                facts = {"change": line_of(scheduler), "repair": f"{repair}{scheduler.kind} and {other.kind}"}
                facts |= {"other": other.kind, "calls": len(moved), "later": later.after[0]}
                facts |= {"before": moved[0].before[0], "after": moved[0].after[0]}
                both = f"{scheduler.kind}.step()", f"{other.kind}.step()"
                yield about(scheduler, "schedule_overwritten", later, both, "by another", **facts)
                break


def _is_written_back(evidence: Evidence, group: GroupLRs, calls: Sequence[SchedulerStep]) -> bool:
    """Whether each call moves a group's rate away from the one constant, non-zero rate of all steps.

    A rate that is kept within bounds, ``max(lr, floor)`` in a warm-up, looks the same: what the calls leave then comes
    nearer to the bound, and goes beyond it in a longer run. A schedule that never does is bounded in vain.
    """
    if not group.constant or not group.known[0] or len(group.values) < FEWEST:
        return False
    lr = group.known[0]
    left = [c.after[group.group] for c in calls if c.at < group.at[-1] and group.group < len(c.after)]
    if len(left) < FEWEST or any(value == lr for value in left):
        return False
    return abs(left[-1] - lr) >= abs(left[0] - lr) or _never_beyond(evidence, group, left[0] < lr)


def _never_beyond(evidence: Evidence, group: GroupLRs, below: bool) -> bool:
    """Whether the calls of the scheduler alone leave the rate on one side of the group's, or at it, for good."""
    from pytest_trainloop.runs.projection import Projections

    try:
        curve = evidence.shared(Projections.of).alone.get(group.optimizer) if evidence.repeatable else None
    except CannotDecide:
        return False
    if curve is None or group.group >= len(curve.lrs[0]):
        return False
    ahead, rounding = curve.group(group.group), 1e-9 * group.known[0]
    return max(ahead) <= group.known[0] + rounding if below else min(ahead) >= group.known[0] - rounding


def _undoes(record: Record, other: Scheduler, scheduler: Scheduler) -> bool:
    """Whether the other one overwrites the rates after each call of this one that moves them: at most one step uses
    what a call leaves."""
    if other.kind not in ABSOLUTE or not other.from_torch or scheduler.kind == other.kind:
        return False
    moved = [c.at for c in calls_of(record, scheduler) if c.before != c.after]
    written, steps = [c.at for c in calls_of(record, other)], [s.at for s in steps_of(record, scheduler.optimizer)]

    def undone(call: int) -> bool:
        following = next((at for at in written if at > call), None)
        return following is not None and sum(call < at < following for at in steps) <= 1

    return len(moved) >= FEWEST - 1 and all(undone(at) for at in moved if at < max(steps, default=0))


def lost_by_hand(evidence: Evidence) -> Iterator[Finding]:
    """Rates that a line writes and that a scheduler overwrites before any step uses them."""
    record = evidence.run()
    for scheduler in record.schedulers:
        if scheduler.kind not in ABSOLUTE or not scheduler.from_torch or scheduler.optimizer is None:
            continue
        calls, steps, lost = calls_of(record, scheduler), steps_of(record, scheduler.optimizer), []
        for call in calls:
            step = next((s for s in reversed(steps) if s.at < call.at), None)
            others = step and any(step.at < o.at < call.at for o in record.of(SchedulerStep))
            if step and not others and call.before and step.lrs[: len(call.before)] != call.before:
                lost.append(call)
        if len(lost) < max(FEWEST, len(calls) - 1) or any(c.before == c.after for c in lost):
            continue
        line, call = evidence.shared(LRWrites.of).line(optimizer=scheduler.optimizer), lost[0]
        facts: dict[str, Any] = {"change": line, "written": call.before[0], "lr": call.after[0]}
        yield about(scheduler, "written_lr_lost", line or call, lost=len(lost), calls=len(calls), **facts)


def unread(evidence: Evidence) -> Iterator[Finding]:
    """A number called a rate that takes new values while the rate of every group stays as it is (one that is logged
    next to a moving rate is not there to be read); keys that are named like an option."""
    from pytest_trainloop.instruments.records.unread_options import UnreadOptions

    record, moving = evidence.run(), []
    for optimizer in record.optimizers:
        steps = [s for s in record.of(Step) if s.optimizer == optimizer.index and not s.nested]
        groups = groups_of(record, optimizer.index)
        if not optimizer.from_torch or len(steps) < FEWEST or not groups or any(g.moves for g in groups):
            continue
        for name in dict.fromkeys(name for step in steps for name in step.named_lrs):
            values = [max(step.named_lrs[name]) for step in steps if name in step.named_lrs]
            if len(set(values)) < FEWEST:
                continue
            key = name.partition('"')[2].rpartition('"')[0]
            line = evidence.shared(LRWrites.of).line(key, optimizer=optimizer.index) if "group" in name else ""
            if ".defaults[" in name:
                line = key_written(record.step_line(), key, "defaults")
            moving.append(name)
            facts: dict[str, Any] = {
                "change": line,
                "lr": numbers(groups[:1]),
                "values": len(set(values)),
                "steps": len(steps),
            }
            facts |= {"first": values[0], "last": values[-1], "kind": optimizer.kind}
            yield found("lr_nobody_reads", line or record.step_line(), (name,), **facts)
            break
    keys = tuple(name.removeprefix("group") for name in moving if "[" in name)
    for finding in evidence.shared(UnreadOptions.of).findings(record, decay=False):
        if not keys or not finding.culprits[0].endswith(keys):
            # of a multiplier next to a schedule by hand the line that writes the rate without it
            by_hand = "a schedule runs in fit" in finding.shown_by and evidence.shared(LRWrites.of).line()
            key = finding.culprits[0].rpartition('["')[2].removesuffix('"]')
            yield replace(finding, change=by_hand or key_written(finding.where, key))


def copied(evidence: Evidence) -> Iterator[Finding]:
    """Groups of ``state_dict()`` that get a rate, while the optimizer keeps its own.

    One that is edited to be saved is read after that, by what saves it. Where it is not saved this time it might be at
    another: a fault is what nobody can save, since the dict of all groups is gone when the rate is written, or what
    makes a schedule of the copies while the optimizer's rate is one number.
    """
    from pytest_trainloop.checks.learning.schedule.copied_groups import CopiedGroups

    record = evidence.run()
    for index in dict.fromkeys(copy.optimizer for copy in record.copied_lrs):
        copies, own = [copy for copy in record.copied_lrs if copy.optimizer == index], groups_of(record, index)
        if not own:
            continue
        groups = evidence.shared(CopiedGroups.of) if evidence.repeatable else None
        writes = [w for w in groups.written if not w.used] if groups is not None and groups.seen else []
        if evidence.repeatable and not writes:
            continue
        alone, still = any(w.alone for w in writes), all(r.constant for r in own)
        certain = alone or (still and len({copy.written for copy in copies}) > 1 and evidence.repeatable)
        if certain or (len(copies) > 1 and still):
            first, last = copies[0].written[0], copies[-1].written[0]
            facts: dict[str, Any] = {
                "level": "fault" if certain else "advice",
                "kind": record.optimizers[index].kind,
                "still": still,
            }
            facts |= {
                "copies": len(copies) if len(copies) > 1 else 0,
                "first": first,
                "last": last if last != first else 0,
            }
            facts |= {"lr": numbers(own[:1]), "line": writes[0].line if writes else "", "alone": alone}
            yield found("lr_written_to_copy", copies[0], ("state_dict()",), **facts)


def zero_for_good(record: Record) -> Iterator[Finding]:
    """Rates that are 0 for good while the steps go on: a schedule that begins again at 0, or whose factor is 0."""
    alone = sum(bool(o.steps) for o in record.optimizers) == 1
    built_at_zero = False
    for scheduler in record.schedulers:
        steps, calls = [s for s in steps_of(record, scheduler.optimizer) if s.lrs], calls_of(record, scheduler)
        bases = scheduler.settings.get("base_lrs", " ")
        onward = scheduler.kind in ONWARD or (scheduler.kind == "LambdaLR" and set(bases) <= set("[]0., "))
        call = next((c for c in calls if any(c.before) and not any(c.after)), None)
        factor = next((f for f in ("gamma", "factor") if scheduler.settings.get(f) in ("0", "0.0")), "")
        known = [(s.at, s.lrs) for s in steps if s.at < scheduler.at]
        known += [
            (c.at, c.after)
            for c in record.of(SchedulerStep)
            if c.optimizer == scheduler.optimizer and c.until and c.at < scheduler.at
        ]
        # a line may put the rate back before it is built, or later (odd: cycles_that_put_the_rate_back)
        begins = onward and len(calls) >= FEWEST - 1 and bool(known) and not any(max(known)[1]) and not scheduler.inner
        # next to an optimizer that goes on it may be intended (odd: factor_that_stops_one_of_two)
        falls = bool(factor) and call is not None and alone
        at = scheduler.at if begins and scheduler.at else call.at if call is not None and falls else 0
        before, after = [s for s in steps if s.at < at], [s for s in steps if s.at > at]
        peak = max((max(s.lrs) for s in before), default=0.0)
        if not scheduler.from_torch or not peak or len(after) < FEWEST or any(any(s.lrs) for s in after):
            continue
        facts: dict[str, Any] = {"before": len(before), "after": len(after), "peak": peak}
        line = line_of(scheduler)
        if at == scheduler.at and not built_at_zero:
            built_at_zero = True
            culprits, variant = (scheduler.kind,), "built at 0"
            yield found("zero_for_good", line or calls[0], culprits, variant, change=line, kind=scheduler.kind, **facts)
        elif at != scheduler.at and call is not None and max(call.before) > peak / 2:
            named = {"kind": scheduler.kind, "factor": factor, "change": line}
            yield found("zero_for_good", call, (scheduler.kind, factor), **named, **facts)


def groups(evidence: Evidence) -> Iterator[Finding]:
    """Groups whose rate is 0, that no schedule reaches, or that lose the rate of their own."""
    record = evidence.run()
    yield from _refused(record)
    for optimizer in record.optimizers:
        own = groups_of(record, optimizer.index)
        if own and len(own[0].values) >= FEWEST:
            yield from _at_zero(evidence, optimizer, own)
            yield from _unscheduled(evidence, optimizer, own)
            yield from _made_equal(evidence, optimizer, own)


def _refused(record: Record) -> Iterator[Finding]:
    """A group without schedule where torch raises: from 2.13 on most schedulers count the groups."""
    call = next((c for c in reversed(record.of(SchedulerStep)) if not c.until), None)
    if call is None or record.raised is None or record.raised.kind != "ValueError":
        return
    scheduler = record.schedulers[call.number]
    if scheduler.groups < len(call.before) and "zip()" in record.raised.message:
        names = held_in(record, record.optimizers[scheduler.optimizer or 0], scheduler.groups)
        facts: dict[str, Any] = {
            "group": scheduler.groups,
            "of": len(call.before),
            "kind": scheduler.kind,
            "held": some(names),
        }
        facts |= {"raised": record.raised.summary, "change": line_of(scheduler)}
        yield found("group_without_schedule", call, names[:8], "refused", **facts)


def _at_zero(evidence: Evidence, optimizer: Optimizer, own: Sequence[GroupLRs]) -> Iterator[Finding]:
    """A group at rate 0 next to others that learn; or all of them at 0 for the first steps."""
    record = evidence.run()
    zero = [g for g in own if g.zero and learns(record, optimizer, g.group)]
    ahead = [one.curve for one in evidence.shared(LRsByHand.of).projected if one.optimizer == optimizer.index]
    # unfrozen by its rate in a later step (odd: unfrozen_by_rates_long_after)
    zero = [g for g in zero if not any(g.group < len(curve.lrs[0]) and any(curve.group(g.group)) for curve in ahead)]
    other = next((g for g in own if max(g.known, default=0) > 0), None)
    if zero and other is not None:
        names = held_in(record, optimizer, *(g.group for g in zero))
        writes = evidence.shared(LRWrites.of)
        line = writes.line(optimizer=optimizer.index, group=other.group)
        facts: dict[str, Any] = {
            "level": "advice",
            "change": writes.line(optimizer=optimizer.index, group=zero[0].group) or line,
        }
        facts |= {"group": zero[0].group, "of": len(own), "steps": len(zero[0].values), "held": some(names)}
        facts |= {"other": other.group, "lr": max(other.known), "line": line}
        yield found("group_at_zero", line or record.step_line(), names[:8], **facts)
    elif all(g.known[:2] == (0.0, 0.0) for g in own) and any(learns(record, optimizer, g.group) for g in own):
        steps = min(next((n for n, v in enumerate(g.known) if v), len(g.known)) for g in own)
        facts = {"steps": steps, "kind": optimizer.kind, "lrs": ", ".join(f"{v:g}" for v in own[0].known[:6])}
        yield found("zero_for_steps", record.step_line(), ("lr",), level="advice", kinds=("attribute",), **facts)


def _unscheduled(evidence: Evidence, optimizer: Optimizer, own: Sequence[GroupLRs]) -> Iterator[Finding]:
    """Groups that keep one rate while the others' are moved."""
    record = evidence.run()
    still = [g for g in own if g.constant and g.known[0] > 0 and learns(record, optimizer, g.group)]
    moving = [g for g in own if g.moves]
    if not still or not moving:
        return
    for scheduler in record.schedulers:
        late = [g for g in still if g.group >= scheduler.groups]
        calls = [c for c in calls_of(record, scheduler) if c.before != c.after]
        driven = scheduler.optimizer == optimizer.index and scheduler.calls and not scheduler.inner
        known = sum(g.group < scheduler.groups for g in moving) == scheduler.groups
        if driven and late and known and len(calls) >= FEWEST:
            group, names = late[0], held_in(record, optimizer, late[0].group)
            facts: dict[str, Any] = {
                "change": line_of(scheduler),
                "kind": scheduler.kind,
                "known": scheduler.groups,
                "calls": len(calls),
            }
            facts |= {"group": group.group, "held": some(names), "lr": group.known[0], "steps": len(group.known)}
            facts |= {"first": moving[0].known[0], "last": moving[0].known[-1]}
            facts["level"] = "advice" if group.known[0] not in {g.known[0] for g in moving} else "fault"
            yield found("group_without_schedule", calls[0], names[:8], **facts)
            return
    if {m for g in moving for m in g.movers} != {"hand"}:
        return
    writes = evidence.shared(LRWrites.of)
    # A group that was added within the run, while a line writes the rates of all before it at each step: it was given
    # its own rate, or its optimizer's. Whether it is to keep it no record tells.
    late = [g for g in still if len(g.known) < len(g.values)]
    before = [g for g in moving if len(g.known) == len(g.values)]
    if late and before and len(late[0].known) >= FEWEST and len(before) + len(late) == late[0].of:
        group, other = late[0], before[0]
        since = other.values[-len(group.known) :]
        if len(set(since)) == len(since):
            names, line = (
                held_in(record, optimizer, group.group),
                writes.line(optimizer=optimizer.index, group=other.group),
            )
            facts = {"level": "advice", "change": line, "group": group.group, "held": some(names), "steps": len(since)}
            facts |= {"lr": group.known[0], "other": other.group, "first": since[0], "last": since[-1]}
            yield found("group_without_schedule", line or record.step_line(), names[:8], "by hand", **facts)
            return
    # Groups that differ in nothing but their weight decay, and begin at one rate, are one schedule's: a fault where the
    # line names the group by its index. Else some groups may keep their rate on purpose
    # (odd: cosine_by_hand_beside_a_constant_head).
    group, line = moving[0], writes.line(optimizer=optimizer.index, group=moving[0].group)
    lines = writes.writes("lr", optimizer=optimizer.index, group=group.group)
    zipped = any("zip(" in loop_around(access.place) for access in lines[:1])
    if zipped or "param_groups[" in code_of(line):
        usual = all(_settings(optimizer, g.group) == _settings(optimizer, group.group) for g in still)
        usual &= {g.known[0] for g in still} <= {_given_lr(optimizer, group), max(group.known)} and len(moving) == 1
        names = held_in(record, optimizer, *(g.group for g in still))
        facts = {
            "level": "fault" if usual else "advice",
            "change": assigned_value(line) or line,
            "group": group.group,
            "of": group.of,
        }
        facts["zipped"] = zipped
        facts |= {"held": some(names), "lr": still[0].known[0], "other": still[0].group, "steps": len(group.known)}
        facts |= {"first": group.known[0], "last": group.known[-1]}
        yield found("one_group_scheduled", line, names[:8], **facts)


def _made_equal(evidence: Evidence, optimizer: Optimizer, own: Sequence[GroupLRs]) -> Iterator[Finding]:
    """Groups that were built with rates of their own, and have one rate at every step."""
    record = evidence.run()
    learning = [g for g in own if g.group < len(optimizer.first_lrs) and learns(record, optimizer, g.group)]
    given = sorted({_given_lr(optimizer, g) for g in learning})
    # a rate of 0 freezes a group until a line sets it (odd: group_begins_at_zero); a line may come after the first step
    if len(given) < 2 or given[0] <= 0 or len({g.values[1:] for g in learning}) > 1:
        return
    moved = next((g for g in learning if g.values[1] != _given_lr(optimizer, g)), learning[0])
    if line := evidence.shared(LRWrites.of).line(optimizer=optimizer.index, group=moved.group):
        facts: dict[str, Any] = {
            "given": " and ".join(f"{lr:g}" for lr in given),
            "groups": len(learning),
            "lr": moved.values[1],
        }
        names = held_in(record, optimizer, *(g.group for g in learning))
        yield found("group_lrs_made_equal", line, names[:8], level="advice", steps=len(moved.values), **facts)


def _given_lr(optimizer: Optimizer, group: GroupLRs) -> float:
    """The rate that a group was given, before a line moved it."""
    return optimizer.first_lrs[group.group] if group.group < len(optimizer.first_lrs) else group.known[0]


def _settings(optimizer: Optimizer, group: int) -> dict[str, str]:
    known = optimizer.settings[group] if group < len(optimizer.settings) else {}
    return {name: text for name, text in known.items() if name != "weight_decay"}


def empty_groups(evidence: Evidence) -> Iterator[Finding]:
    """Patterns that put parameters into an empty group with a rate of its own, once they are answered yes for them."""
    from pytest_trainloop.instruments.tracing.asked_names import AskedNames
    from pytest_trainloop.instruments.tracing.unmatched_names import unmatched_names

    def empty_in(optimizer: Optimizer) -> dict[int, float]:
        return {n: lr for n, lr in enumerate(optimizer.first_lrs) if n not in optimizer.groups}

    def groups_in(record: Record, index: int) -> dict[str, int]:
        same = (o for o in record.optimizers if o.index == index)
        return {record.name(i): group for o in same for i, group in zip(o.parameters, o.groups, strict=True)}

    for optimizer in evidence.run().optimizers:
        empty, index = empty_in(optimizer), optimizer.index
        others = {lr for number, lr in enumerate(optimizer.first_lrs) if number not in empty}
        if not others or others.issuperset(empty.values()):
            continue  # such as the group without decay of a model without biases
        record = evidence.shared(AskedNames.of).record
        held = [] if record is None else [n for n in groups_in(record, index) if not record.declared_frozen(n)]
        own: list[float] = []

        def moved(answered: Record, names: Sequence[str], optimizer: Optimizer = optimizer) -> bool:
            groups, empty = groups_in(answered, optimizer.index), empty_in(optimizer)
            own.extend(empty[groups[name]] for name in names if groups.get(name) in empty)  # noqa: B023
            return all(groups.get(name) in empty for name in names)

        for one in unmatched_names(evidence, held, moved):
            if one.nearly:  # a model need not have what is listed (odd: a_rate_for_a_part_that_the_model_has_not)
                facts: dict[str, Any] = {
                    "patterns": some(one.patterns),
                    "asked": one.asked,
                    "lr": own[-1],
                    "other": max(others),
                }
                yield found("group_left_empty", one.place, one.nearly, level="advice", repair=one.repair, **facts)
