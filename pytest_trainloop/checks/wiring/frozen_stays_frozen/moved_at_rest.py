"""Frozen parameters that optimizer steps move, and why. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.recording.events import GradWrite, Step, TensorSample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.recording.record import Parameter, Record

PARALLEL = 0.999
"""Cosine from which an update runs along the weights: decay alone has 1 but for the rounding of the weights."""

STEADY = 0.05
"""Largest spread of the updates of a single number, each over its learning rate, if decay makes them: they shrink with
the weight, by learning rate times decay a step."""

LEAST_STEPS = 3
"""Steps that must find a zeroed gradient before zeroing is taken for a way to freeze."""


MoveCause = Literal["still_trainable", "stale_gradient", "weight_decay", "momentum", "unknown"]


@dataclass(frozen=True, slots=True)
class Moved:
    """One frozen parameter that optimizer steps moved."""

    name: str
    cause: MoveCause
    update: float
    """The largest update, over the parameter's largest entry."""
    steps: int
    """Steps that moved it."""
    place: str
    cosine: float | None = None
    """The cosine of the update with the weights, where it shows weight decay."""
    may_decay: bool = False
    """Whether weight decay is on, and the direction does not show whether it moved the parameter."""


def moved_at_rest(record: Record) -> list[Moved]:
    """Parameters that a step of an optimizer moved although they are declared frozen or do not require grad."""
    assigned = {i for w in record.of(GradWrite) if w.assigns for i in w.parameters}
    found: list[Moved] = []
    for p in record.parameters:
        steps = [s for s in record.of(Step) if s.full and not s.nested and s.reads and p.index in s.reads[-1].grads]
        moving = [s for s in steps if s.updates.get(p.index, 0.0) > 0.0]
        meant = record.declared_frozen(p.name) or _zeroed_to_freeze(record, p.index, steps, moving)
        moves = [s for s in moving if meant or p.index in s.frozen]
        if moves and (moved := _judged(record, p, moves, assigned=p.index in assigned)):
            found.append(moved)
    return found


def _zeroed_to_freeze(record: Record, index: int, steps: Sequence[Step], moving: Sequence[Step]) -> bool:
    """Whether user code freezes the parameter by zeroing its gradient.

    A gradient arrives before every step, every step finds zero there, and others next to it.
    """
    if len(steps) < LEAST_STEPS or len(moving) != len(steps):
        return False
    others = all(any(g is not None and not g.zero for g in s.reads[-1].grads.values()) for s in steps)
    return others and all(
        (grad := _read(index, s)) is not None and grad.zero and _arrived(record, index, s) for s in steps
    )


def _judged(record: Record, p: Parameter, moves: Sequence[Step], *, assigned: bool) -> Moved | None:
    if (assigned or _refilled(p.index, moves)) and any(not _no_gradient(p.index, s) for s in moves):
        return None
    fresh = [s for s in moves if p.index not in s.frozen and _fresh_gradient(record, p.index, s)]
    if fresh:
        return _moved(p, "still_trainable", fresh)
    stale = [s for s in moves if _stale_gradient(record, p.index, s)]
    if stale:
        return _moved(p, "stale_gradient", stale)
    idle = [s for s in moves if _no_gradient(p.index, s)]
    if not idle:
        return None
    along = [s.along.get(p.index, 0.0) < -PARALLEL for s in idle]
    if all(along) and _in_step_with_lr(record, p, idle):
        decay = replace(_moved(p, "weight_decay", idle), cosine=idle[0].along[p.index])
        return None if _decayed_on_purpose(record, p.index, idle[0]) else decay
    group, decays = _group(record, p.index, idle[0]), record.optimizers[idle[0].optimizer].weight_decays
    may_decay = group < len(decays) and decays[group] > 0.0
    if any(not _no_gradient(p.index, s) for s in _earlier(record, idle[0])):
        return replace(_moved(p, "momentum", idle), may_decay=may_decay)
    # without an earlier gradient there is no momentum: a hook that averages, or an optimizer that needs no gradients
    if may_decay and not _decayed_on_purpose(record, p.index, idle[0]):
        return replace(_moved(p, "unknown", idle), may_decay=True)
    return None


def without_decay(moved: Sequence[Moved], without: Record) -> list[Moved]:
    """The causes after a run without weight decay: what does not move in it was moved by decay. Moves that are still
    unknown are left out."""
    known = {p.name: p.index for p in without.parameters}
    steps = [s for s in without.of(Step) if s.reads]
    moving = {i for s in steps for i, update in s.updates.items() if update > 0.0 and _no_gradient(i, s)}
    by_decay = {m.name for m in moved if m.may_decay and known.get(m.name) not in moving}
    decided = [replace(m, cause="weight_decay") if m.name in by_decay else m for m in moved]
    return [m for m in decided if m.cause != "unknown"]


def _in_step_with_lr(record: Record, p: Parameter, steps: Sequence[Step]) -> bool:
    """Whether the updates are one multiple of the learning rate: so is decay, whereas momentum dies out. For several
    entries the direction of the update decides."""
    if math.prod(p.shape) > 1:
        return True
    groups = [_group(record, p.index, s) for s in steps]
    lrs = [s.lrs[group] if group < len(s.lrs) else math.nan for s, group in zip(steps, groups, strict=True)]
    shares = [s.updates[p.index] / lr for s, lr in zip(steps, lrs, strict=True) if lr > 0]
    return len(shares) > 1 and max(shares) - min(shares) < STEADY * max(shares)


def _group(record: Record, index: int, step: Step) -> int:
    optimizer = record.optimizers[step.optimizer]
    return dict(zip(optimizer.parameters, optimizer.groups, strict=False)).get(index, 0)


def _decayed_on_purpose(record: Record, index: int, step: Step) -> bool:
    """Whether a group that gets no gradients has a larger decay than every group that trains: it is to shrink."""
    optimizer = record.optimizers[step.optimizer]
    mine = _group(record, index, step)
    training = {
        g
        for i, g in zip(optimizer.parameters, optimizer.groups, strict=False)
        if any(not _no_gradient(i, s) for s in record.of(Step) if s.reads)
    }
    decays = optimizer.weight_decays
    return bool(training) and mine not in training and all(decays[mine] > decays[g] for g in training)


def _moved(p: Parameter, cause: MoveCause, steps: Sequence[Step]) -> Moved:
    return Moved(p.name, cause, max(s.updates[p.index] for s in steps), len(steps), str(steps[0].place))


def _earlier(record: Record, step: Step) -> list[Step]:
    """The steps of the same optimizer before this one."""
    return [s for s in record.of(Step) if s.optimizer == step.optimizer and s.at < step.at and s.reads]


def _read(index: int, step: Step) -> TensorSample | None:
    return step.reads[-1].grads.get(index)


def _no_gradient(index: int, step: Step) -> bool:
    grad = _read(index, step)
    return grad is None or grad.zero


def _fresh_gradient(record: Record, index: int, step: Step) -> bool:
    """Whether the step reads a gradient, and one other than zero arrived since the optimizer's step before."""
    return not _no_gradient(index, step) and _arrived(record, index, step)


def _arrived(record: Record, index: int, step: Step) -> bool:
    """Whether a gradient other than zero arrived since the optimizer's step before. One that is not finite is cleaned,
    which does not freeze."""
    before = max((s.reads[-1].at for s in _earlier(record, step)), default=0)
    arrived = [a.incoming for a in record.arrivals(index) if before < a.at < step.reads[-1].at]
    return any(not sample.zero for sample in arrived) and all(sample.finite for sample in arrived)


def _refilled(index: int, steps: Sequence[Step]) -> bool:
    """Whether a hook of the optimizer gave the parameter another gradient after it was recorded and before the step."""
    pairs = [(_read(index, s), s.left.get(index)) for s in steps]
    return any(left is not None and not left.zero and not left.same(read) for read, left in pairs)


def _stale_gradient(record: Record, index: int, step: Step) -> bool:
    grad = _read(index, step)
    if grad is None or grad.zero or _fresh_gradient(record, index, step):
        return False
    return any(grad.same(_read(index, s)) or grad.same(s.left.get(index)) for s in _earlier(record, step))
