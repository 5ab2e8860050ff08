"""What the groups of an optimizer say by themselves, without a further run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.learning.weight_decay_groups.causes import found
from pytest_trainloop.checks.learning.weight_decay_groups.groups import FLAT, PLURAL, kind_of, listed
from pytest_trainloop.core.errors import CannotDecide, TrainLoopError
from pytest_trainloop.instruments.tracing.given_groups import GivenGroups
from pytest_trainloop.runs.projection import Projections

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups, Group, Kind
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

MOST_MOMENTUM_OF_A_SWAP, LEAST_DECAY_OF_A_SWAP = 0.01, 0.5
"""Momenta in use begin at 0.5, and decays in use end at 0.1 (both with orders of magnitude to spare)."""

LEAST_SHRINKAGE = 0.05
"""A shrinkage that training does not notice: gains and biases move by more than that of their own."""

SAMPLED = 200
"""Calls of a schedule at which its rates are read."""


def swapped(groups: DecayGroups) -> Iterator[Finding]:
    if groups.swapped is not None:
        on, off = groups.swapped
        facts: dict[str, Any] = {"on": on.number, "off": off.number, "contents": on.contents, "others": off.contents}
        yield found("groups_swapped", "", on.names, decay=on.decay, **facts)


def divided_without_effect(evidence: Evidence, groups: DecayGroups) -> Iterator[Finding]:
    """A group for matrices and one for vectors with one decay, by the default of the optimizer or as given."""
    if groups.divided is None:
        return
    matrices, vectors = groups.divided
    facts: dict[str, Any] = {"matrices": matrices.number, "vectors": vectors.number, "contents": vectors.contents}
    if vectors.decay:
        given = evidence.shared(GivenGroups.of).group(vectors.optimizer, vectors.number)
        steps = [s for s in evidence.run().innermost_steps() if s.optimizer == matrices.optimizer]
        # with rates of their own the groups may be there for these
        one_lr = all(s.lrs[matrices.number] == s.lrs[vectors.number] for s in steps)
        if given is not None and given <= {"params", "lr"} and one_lr:
            facts |= {"optimizer": groups.kinds[vectors.optimizer], "default": vectors.default}
            facts |= {"decay": vectors.decay, "other": matrices.decay}
            yield found("decays_by_default", "", vectors.names, **facts)
            return
    if matrices.decay == vectors.decay:
        facts |= {"decay": vectors.decay, "lr": vectors.lr}
        yield found("split_without_effect", "", vectors.names, level="advice", **facts)


def decayed(evidence: Evidence, groups: DecayGroups) -> Iterator[Finding]:
    """Advice on what decays besides matrices."""
    flat: tuple[Kind, ...] = ("norm", "bias", "embedding", *(("vector",) if groups.splits else ()))
    names = tuple(name for kind in flat for name in groups.names(kind, decayed=True))
    if not names or (
        groups.splits and not any(groups.names(kind, decayed=True) for kind in flat if kind != "embedding")
    ):
        return  # to decay both tables and matrices is the usual division by dimension
    shrinks = shrinkage(evidence, groups)
    decaying = [g for g in groups.groups if g.decay > 0 and any(kind in g.members for kind in flat)]
    divided = groups.splits or bool(groups.empty)
    if not divided if shrinks is None else shrinks < LEAST_SHRINKAGE:
        return  # to decay everything is a recipe of its own (odd: everything_decays_as_for_resnets)
    shares = [
        f"{groups.count(kind, decayed=True)} of {groups.count(kind)} {PLURAL[kind][1]}"
        for kind in flat
        if groups.count(kind, decayed=True)
    ]
    where = ", ".join(f"group {g.number} of {groups.kinds[g.optimizer]} at {g.decay:g}" for g in decaying[:3])
    facts: dict[str, Any] = {"shares": listed(shares), "groups": where, "lr": decaying[0].lr, "level": "advice"}
    facts |= {"known": shrinks is not None, "percent": 100 * (shrinks or 0.0)}
    yield found("norms_and_biases_decay", "", names, **facts)


def on_last_only(evidence: Evidence, groups: DecayGroups) -> Iterator[Finding]:
    """Decay that shrinks the last weight of a group and no other: a variable left over from a loop that has ended. A
    vector that decays where a matrix does not is never intended. A single matrix may be (a head, where tables and
    vectors are spared), so two others that do not decay are asked for."""
    record = evidence.run()
    for optimizer in record.optimizers:
        out, line = groups.spared.get(optimizer.index, (frozenset(), ""))
        members = [(i, g) for i, g in zip(optimizer.parameters, optimizer.groups, strict=True) if record.reached(i)]
        decays = {i for i, _ in members} - out
        kinds = {i: kind_of(record.parameters[i]) for i, _ in members}
        matrices = sum(kinds[i] == "matrix" and optimizer.weight_decays[g] > 0 for i, g in members if i in out)
        vectors_only = all(kinds[i] in FLAT for i in decays)
        if line and decays <= set({g: i for i, g in members}.values()) and matrices > (not vectors_only):
            names = tuple(record.parameters[i].name for i in sorted(decays))
            facts: dict[str, Any] = {"optimizer": optimizer.kind, "others": len(out), "matrices": matrices}
            yield found("decay_on_last_only", line, names, **facts)


def inside_adam(groups: DecayGroups) -> Iterator[Finding]:
    inside = [g for g in groups.groups if g.into_gradient and g.decay > 0]
    if inside:
        facts: dict[str, Any] = {
            "optimizer": groups.kinds[inside[0].optimizer],
            "decay": inside[0].decay,
            "groups": len(inside),
        }
        yield found("decay_inside_adam", "", ("weight_decay",), level="advice", **facts)


def overdone(groups: DecayGroups) -> Iterator[Finding]:
    """Decay in the place of momentum, and decay that turns weights over."""
    for group in groups.groups:
        each = group.lr * group.decay
        facts: dict[str, Any] = {
            "optimizer": groups.kinds[group.optimizer],
            "group": group.number,
            "decay": group.decay,
        }
        if 0 < group.momentum <= MOST_MOMENTUM_OF_A_SWAP and group.decay >= LEAST_DECAY_OF_A_SWAP:
            repair = f"give both by name: momentum={group.decay:g}, weight_decay={group.momentum:g}"
            facts |= {"momentum": group.momentum, "percent": 100 * each, "repair": repair}
            yield found("momentum_and_decay_swapped", "", ("weight_decay", "momentum"), **facts)
        elif each > 1 and not group.into_gradient:
            facts |= {"each": each, "left": 1 - each, "lr": group.lr}
            facts["repair"] = (
                f"weight_decay={1e-4 / group.lr:.1g} decays a weight to 37 % in 10000 steps at this rate: "
                "1 / (lr * weight_decay) is that number of steps"
            )
            yield found("decay_turns_weights_over", "", ("weight_decay",), **facts)


def shrinkage(evidence: Evidence, groups: DecayGroups) -> float | None:
    """The largest share over the groups whose norms, biases or tables decay by which the whole run would shrink weights
    that get no gradient: ``1 - exp(-sum of rate * decay)`` over ``steps=``; None where the plan is not declared.

    Rates are those of the projected schedule. Where none is projected it is the highest that the watched run shows of a
    group: an upper bound for one that decays from there.
    """
    steps = evidence.declared("steps")
    if not isinstance(steps, int):
        return None
    record = evidence.run()
    shares = []
    for group in groups.groups:
        seen = [s.lrs[group.number] for s in record.innermost_steps() if s.optimizer == group.optimizer]
        peak = record.optimizers[group.optimizer].peak_lrs[group.number]
        highest = max([lr for lr in (*seen, peak) if math.isfinite(lr)], default=0.0)
        mean = _mean_lr(evidence, group)
        highest = highest if mean is None else mean
        if group.decay > 0 and group.members.keys() - {"matrix"}:
            shares.append(1 - math.exp(-steps * highest * group.decay))
    return max(shares, default=None)


def _mean_lr(evidence: Evidence, group: Group) -> float | None:
    """The mean learning rate of a group over the plan; None where its schedule, or the plan's calls, are not known."""
    try:
        schedulers = evidence.shared(Projections.of).schedulers
    except (CannotDecide, TrainLoopError):
        return None
    for projected in schedulers:
        if projected.optimizer == group.optimizer and projected.planned and projected.raises_at is None:
            calls = [projected.planned * i // SAMPLED for i in range(SAMPLED)]
            lrs = [projected.lr(call) for call in calls]
            if all(group.number < len(each) for each in lrs):
                return sum(float(each[group.number]) for each in lrs) / SAMPLED
    return None
