"""Frozen parameters that optimizer steps move, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.frozen_stays_frozen.causes import CAUSES, found
from pytest_trainloop.recording.events import GradWrite, Step
from pytest_trainloop.runs.optimizer_options import without_weight_decay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import TensorSample
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

PARALLEL = 0.999
"""Cosine from which an update runs along the weights: decay alone has 1 but for the rounding of the weights."""

STEADY = 0.05
"""Largest spread of the updates of a single number, each over its learning rate, if decay makes them: they shrink with
the weight, by learning rate times decay a step."""

LEAST_STEPS = 3
"""Steps that must find a zeroed gradient before zeroing is taken for a way to freeze."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A frozen parameter that these steps moved."""

    parameter: Parameter
    cause: str
    """Empty where only a run without weight decay may show it."""
    steps: Sequence[Step]
    cosine: float | None = None
    """That of the update with the weights, where it shows weight decay."""
    may_decay: bool = False
    """Whether weight decay is on, and the direction does not show whether it moved the parameter."""

    @property
    def update(self) -> float:
        """The largest update, over the parameter's largest entry."""
        return max(s.updates[self.parameter.index] for s in self.steps)


def moved_by_steps(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Findings about parameters that a step moved although they are declared frozen or do not require grad."""
    assigned = {i for w in record.of(GradWrite) if w.assigns for i in w.parameters}
    moved = [m for p in record.parameters if (m := _moved(record, p, assigned=p.index in assigned)) is not None]
    if any(m.may_decay for m in moved):  # what does not move without weight decay was moved by it
        without = evidence.rerun(contexts=without_weight_decay)
        steps = [s for s in without.of(Step) if s.reads]
        moving = {i for s in steps for i, size in s.updates.items() if size > 0.0 and _gradient(i, s) is None}
        decayed = {m.parameter.name for m in moved if m.may_decay} - set(without.names(moving))
        moved = [replace(m, cause="weight_decay") if m.parameter.name in decayed else m for m in moved]
    by_cause = {cause: [m for m in moved if m.cause == cause] for cause in CAUSES}
    if by_cause["momentum"]:  # an optimizer that keeps momentum may decay what has none as well
        by_cause["momentum"] += by_cause.pop("weight_decay")
    for cause, mine in by_cause.items():
        if mine:
            most = max((m for m in mine if m.cause == cause), key=lambda m: m.update)
            facts = {"steps": len(most.steps), "rounds": record.rounds, "most": most.parameter.name}
            facts |= {"update": most.update, "from_zero": most.update >= 1e6, "cosine": most.cosine}
            variant = "" if most.cosine is None else "along its values"
            yield found(cause, most.steps[0], [m.parameter.name for m in mine], variant, **facts)


def _moved(record: Record, p: Parameter, *, assigned: bool) -> Moved | None:
    """How steps move one parameter that they should leave as it is."""
    index = p.index
    steps = [s for s in record.of(Step) if s.full and not s.nested and s.reads and index in s.reads[-1].grads]
    moving = [s for s in steps if s.updates.get(index, 0.0) > 0.0]
    intended = record.declared_frozen(p.name)
    if not intended and len(moving) == len(steps) >= LEAST_STEPS:
        # user code freezes by zeroing: a gradient arrives before every step, which finds zero there, and others next to
        # it; a bias that cancels in a difference gets none (odd: preferences_of_pairs)
        intended = all(
            any(g is not None and not g.zero for g in s.reads[-1].grads.values())
            and (grad := s.reads[-1].grads[index]) is not None
            and grad.zero
            and _arrived(record, index, s)
            for s in steps
        )
    moves = [s for s in moving if intended or index in s.frozen]
    idle = [s for s in moves if _gradient(index, s) is None]
    read = [s for s in moves if _gradient(index, s) is not None]
    # user code assigned the gradient (odd: keeping_masters_by_hooks), or a hook of the optimizer gave another after it
    # was recorded
    lefts = [(s.left.get(index), s.reads[-1].grads[index]) for s in moves]
    given = assigned or any(left is not None and not left.zero and not left.same(grad) for left, grad in lefts)
    if not moves or (given and read):
        return None
    if fresh := [s for s in read if index not in s.frozen and _arrived(record, index, s)]:
        return Moved(p, "still_trainable", fresh)
    if stale := [s for s in read if not _arrived(record, index, s) and _used_before(record, index, s)]:
        return Moved(p, "stale_gradient", stale)
    if not idle:
        return None
    first, group = idle[0], _group(record, index, idle[0])
    along = all(s.along.get(index, 0.0) < -PARALLEL for s in idle)
    if along and math.prod(p.shape) <= 1:  # of one entry the direction says nothing, but momentum dies out
        lrs = [s.lrs[g] if (g := _group(record, index, s)) < len(s.lrs) else math.nan for s in idle]
        shares = [s.updates[index] / lr for s, lr in zip(idle, lrs, strict=True) if lr > 0]
        along = len(shares) > 1 and max(shares) - min(shares) < STEADY * max(shares)
    optimizer, decays = record.optimizers[first.optimizer], record.optimizers[first.optimizer].weight_decays
    may_decay = group < len(decays) and decays[group] > 0.0
    trained = any(_gradient(index, s) is not None for s in _earlier(record, first))
    # without an earlier gradient there is no momentum: a hook that averages, or an optimizer that needs no gradients
    if not along and (trained or not may_decay):
        return Moved(p, "momentum", idle, may_decay=may_decay) if trained else None
    # a group that gets no gradients and decays more than every group that trains is to shrink
    # (odd: keeping_a_branch_under_decay_only)
    reading = [s for s in record.of(Step) if s.reads]
    groups = zip(optimizer.parameters, optimizer.groups, strict=False)
    training = {g for i, g in groups if any(_gradient(i, s) is not None for s in reading)}
    if training and group not in training and all(decays[group] > decays[g] for g in training):
        return None
    return Moved(p, "weight_decay", idle, first.along[index]) if along else Moved(p, "", idle, may_decay=True)


def _group(record: Record, index: int, step: Step) -> int:
    optimizer = record.optimizers[step.optimizer]
    return dict(zip(optimizer.parameters, optimizer.groups, strict=False)).get(index, 0)


def _gradient(index: int, step: Step) -> TensorSample | None:
    """What the step reads, if it is not zero."""
    grad = step.reads[-1].grads.get(index)
    return None if grad is None or grad.zero else grad


def _earlier(record: Record, step: Step) -> list[Step]:
    """The steps of the same optimizer before this one."""
    return [s for s in record.of(Step) if s.optimizer == step.optimizer and s.at < step.at and s.reads]


def _arrived(record: Record, index: int, step: Step) -> bool:
    """Whether a gradient other than zero arrived since the optimizer's step before. One that is not finite is cleaned,
    which does not freeze."""
    before = max((s.reads[-1].at for s in _earlier(record, step)), default=0)
    arrived = [a.incoming for a in record.arrivals(index) if before < a.at < step.reads[-1].at]
    return any(not sample.zero for sample in arrived) and all(sample.finite for sample in arrived)


def _used_before(record: Record, index: int, step: Step) -> bool:
    """Whether the gradient that the step reads is one that an earlier step read or left, bit for bit."""
    grad = step.reads[-1].grads[index]
    earlier = _earlier(record, step)
    return grad is not None and any(
        grad.same(s.reads[-1].grads.get(index)) or grad.same(s.left.get(index)) for s in earlier
    )
