"""What moves although it rests: parameters inside optimizer steps, running statistics in forward passes. Plain data, no
torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import Fact, GradWrite, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.record import Parameter, Record, Statistics

PARALLEL = 0.999
"""Cosine from which an update runs along the weights: decay alone has 1 but for the rounding of the weights."""


STEADY = 0.05
"""How far the updates of a single number, each over its rate, may lie apart when decay makes them: they shrink with the
weight, by rate times decay a step."""

LEAST_STEPS = 3
"""Steps that must find a zeroed gradient before it is taken for a way to freeze."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One parameter at rest that steps moved: why, how far at most (over its largest entry), in how many steps.
    ``may_decay``: weight decay is on, and the direction does not tell whether it did it."""

    name: str
    cause: str
    update: float
    steps: int
    shown: str
    place: str
    may_decay: bool = False


def moved_at_rest(record: Record) -> list[Moved]:
    """Parameters that a step of an optimizer moved although they are declared frozen or do not require grad."""
    by_hand = {i for w in record.of(GradWrite) if w.assigns for i in w.parameters}
    found: list[Moved] = []
    for p in record.parameters:
        declared = record.declared_frozen(p.name)
        moving = _moving(record, p.index)
        silenced = declared or _silenced(record, p.index, moving)
        moves = [s for s in moving if silenced or p.index in s.resting]
        if moves and (moved := _judged(record, p, moves, by_hand=p.index in by_hand)):
            found.append(moved)
    return found


def _moving(record: Record, index: int) -> list[Step]:
    """Steps that moved the parameter and whose optimizer holds it."""
    return [
        s
        for s in record.of(Step)
        if s.full and not s.nested and s.updates.get(index, 0.0) > 0.0 and s.reads and index in s.reads[-1].grads
    ]


def _silenced(record: Record, index: int, moving: Sequence[Step]) -> bool:
    """Whether somebody freezes the parameter by setting its gradient to zero: one arrives before every step, and every
    step finds zero there, and other gradients beside it."""
    steps = [s for s in record.of(Step) if s.full and not s.nested and s.reads and index in s.reads[-1].grads]
    beside = all(any(g is not None and not g.zero for g in s.reads[-1].grads.values()) for s in steps)
    zero = all((grad := _read(index, s)) is not None and grad.zero and _arrived(record, index, s) for s in steps)
    return len(steps) >= LEAST_STEPS and len(moving) == len(steps) and beside and zero


def _judged(record: Record, p: Parameter, moves: Sequence[Step], *, by_hand: bool) -> Moved | None:
    if (by_hand or _refilled(p.index, moves)) and any(not _idle(p.index, s) for s in moves):
        return None
    fresh = [s for s in moves if p.index not in s.resting and _fresh_gradient(record, p.index, s)]
    if fresh:
        return _made(
            p, "still_trainable", fresh, "it requires grad, a gradient arrives, and the step that reads it moves it"
        )
    stale = [s for s in moves if _stale_gradient(record, p.index, s)]
    if stale:
        return _made(p, "stale_gradient", stale, "the gradient that the step reads is bit for bit one read before")
    idle = [s for s in moves if _idle(p.index, s)]
    decayed = [s for s in idle if s.along.get(p.index, 0.0) < -PARALLEL]
    if idle and len(decayed) == len(idle) and _in_step_with_rates(record, p, decayed):
        if _decayed_on_purpose(record, p.index, decayed[0]):
            return None
        return _made(
            p, "weight_decay", decayed, f"the update runs along the weights (cosine {decayed[0].along[p.index]:.4f})"
        )
    if not idle:
        return None
    by_decay = _decays(record, p.index, idle[0])
    if _consumed_before(record, p.index, idle[0]):
        made = _made(p, "momentum", idle, "the step finds a gradient of zero or none, and the update is no decay")
        return replace(made, may_decay=by_decay)
    if by_decay and not _decayed_on_purpose(record, p.index, idle[0]):
        return replace(_made(p, "unknown", idle, ""), may_decay=True)
    return None


def told_apart(moved: Sequence[Moved], without: Record) -> list[Moved]:
    """Those that rest in a run without weight decay moved by it; where nothing else is known they are left out."""
    known = {p.name: p.index for p in without.parameters}
    moving = {
        i for s in without.of(Step) for i, update in s.updates.items() if update > 0.0 and s.reads and _idle(i, s)
    }
    decided: list[Moved] = []
    for m in moved:
        if m.may_decay and known.get(m.name) not in moving:
            m = replace(m, cause="weight_decay", shown="without weight decay the same run leaves it where it is")
        if m.cause != "unknown":
            decided.append(m)
    return decided


def _decays(record: Record, index: int, step: Step) -> bool:
    group, decays = _group(record, index, step), record.optimizers[step.optimizer].decays
    return group < len(decays) and decays[group] > 0.0


def _in_step_with_rates(record: Record, p: Parameter, steps: Sequence[Step]) -> bool:
    """Whether the updates are one multiple of the rate: so is decay, whereas momentum dies out. Several entries tell
    them apart by their direction alone."""
    if math.prod(p.shape) > 1:
        return True
    rates = [_rate(record, p.index, s) for s in steps]
    shares = [s.updates[p.index] / rate for s, rate in zip(steps, rates, strict=True) if rate > 0]
    return len(shares) > 1 and max(shares) - min(shares) < STEADY * max(shares)


def _rate(record: Record, index: int, step: Step) -> float:
    group = _group(record, index, step)
    return step.rates[group] if group < len(step.rates) else math.nan


def _group(record: Record, index: int, step: Step) -> int:
    optimizer = record.optimizers[step.optimizer]
    return dict(zip(optimizer.parameters, optimizer.groups, strict=False)).get(index, 0)


def _decayed_on_purpose(record: Record, index: int, step: Step) -> bool:
    """Whether a group all of which rests was given a decay of its own, larger than that of the groups that train: it is
    to shrink."""
    optimizer = record.optimizers[step.optimizer]
    mine = _group(record, index, step)
    training = {
        g
        for i, g in zip(optimizer.parameters, optimizer.groups, strict=False)
        if any((grad := _read(i, s)) is not None and not grad.zero for s in record.of(Step) if s.reads)
    }
    decays = optimizer.decays
    return bool(training) and mine not in training and all(decays[mine] > decays[g] for g in training)


def _consumed_before(record: Record, index: int, step: Step) -> bool:
    """Whether the optimizer has had a gradient of the parameter: without one there is no momentum, and what moves it is
    something else (a hook that averages, an optimizer that needs no gradients)."""
    earlier = [s for s in record.of(Step) if s.optimizer == step.optimizer and s.at < step.at and s.reads]
    return any(not _idle(index, s) for s in earlier)


def _made(p: Parameter, cause: str, steps: Sequence[Step], shown: str) -> Moved:
    return Moved(p.name, cause, max(s.updates[p.index] for s in steps), len(steps), shown, str(steps[0].place))


def _read(index: int, step: Step) -> Fact | None:
    return step.reads[-1].grads.get(index)


def _idle(index: int, step: Step) -> bool:
    grad = _read(index, step)
    return grad is None or grad.zero


def _fresh_gradient(record: Record, index: int, step: Step) -> bool:
    """Whether the step reads a gradient, and one other than zero came in since the optimizer's step before."""
    return not _idle(index, step) and _arrived(record, index, step)


def _arrived(record: Record, index: int, step: Step) -> bool:
    """Whether a gradient other than zero came in since the optimizer's step before; one that is not finite is cleaned,
    not silenced (finite)."""
    earlier = [s for s in record.of(Step) if s.optimizer == step.optimizer and s.at < step.at and s.reads]
    before = max((s.reads[-1].at for s in earlier), default=0)
    came = [a.incoming for a in record.arrivals(index) if before < a.at < step.reads[-1].at]
    return any(not fact.zero for fact in came) and all(fact.finite for fact in came)


def _refilled(index: int, steps: Sequence[Step]) -> bool:
    """Whether a hook of the optimizer gave it another gradient between our look and the step."""
    pairs = [(_read(index, s), s.left.get(index)) for s in steps]
    return any(left is not None and not left.zero and not left.same(read) for read, left in pairs)


def _stale_gradient(record: Record, index: int, step: Step) -> bool:
    grad = _read(index, step)
    if grad is None or grad.zero:
        return False
    earlier = [s for s in record.of(Step) if s.optimizer == step.optimizer and s.at < step.at and s.reads]
    known = [g for s in earlier for g in (_read(index, s), s.left.get(index)) if g is not None]
    return any(grad.same(g) for g in known) and not _fresh_gradient(record, index, step)


def drifting(record: Record) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Level, names and place of running statistics that change while all weights of their norm rest. Not those of norms
    that rest alone, with no layer beside them: their weights are left at one and zero on purpose, and the statistics
    follow what trains."""
    layers = any(len(p.shape) > 1 and not p.trainable and p.role == "model" for p in record.parameters)
    drifted = [s for s in record.statistics if s.drifted and _rests(record, s.owner)]
    drifted = [s for s in drifted if layers or record.declared_frozen(s.name)]
    fault = [
        s
        for s in drifted
        if record.declared_frozen(s.name) or (_within_training(record, s) and not _of_a_copy(record, s))
    ]
    for level, chosen in (("fault", fault), ("advice", [s for s in drifted if s not in fault])):
        yield level, tuple(s.name for s in chosen), _place(record, chosen)


def _rests(record: Record, owner: str) -> bool:
    """Whether the norm has weights, or else what is declared frozen holds it, and none of them trains or is written by
    hand."""
    weights = [p for p in record.parameters if p.owner == owner]
    if not weights and record.declared_frozen(owner):
        return True
    changed = record.changed() | record.moved_outside_steps()
    return bool(weights) and not any(p.trainable or p.index in changed for p in weights)


def _of_a_copy(record: Record, statistics: Statistics) -> bool:
    """Whether the norm belongs to a net that began with the weights of one that trains (a target, a momentum encoder):
    it follows in its own time."""
    part = statistics.owner.split(".")[0]
    mine = [p for p in record.parameters if p.name.split(".")[0] == part and len(p.shape) > 1]
    others = [p for p in record.parameters if p.trainable and p.name.split(".")[0] != part and len(p.shape) > 1]
    return any(p.start.sample and p.start.same(q.start) for p in mine for q in others if p.shape == q.shape)


def _within_training(record: Record, statistics: Statistics) -> bool:
    """Whether the norm runs, with gradients on, within a module other parts of which are trained."""
    trained = {p.owner for p in record.parameters if record.reached(p.index) and p.index in record.held}
    return any(
        statistics.owner in f.in_training and any(record.below(f.module, owner) for owner in trained)
        for f in record.root_forwards()
        if f.grad_enabled
    )


def _place(record: Record, drifted: Sequence[Statistics]) -> str:
    owners = {s.owner for s in drifted}
    return next((str(f.place) for f in record.root_forwards() if owners & set(f.in_training)), "")
