"""Running statistics that follow the data although the weights of their norm are frozen. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import ModeCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.recording.record import Record, Statistics


@dataclass(frozen=True, slots=True)
class Drift:
    """Running statistics that change, and the first forward pass in which a norm of them ran in training mode."""

    names: tuple[str, ...]
    place: str
    switched: str = ""
    """The ``train()`` before it that put the norm into training mode, if it was called inside ``fit``."""


def drifting(record: Record) -> tuple[Drift, Drift]:
    """Drift that is a fault, and drift that is advice; either may be empty.

    Norms that are frozen alone, with no layer next to them, are left out: their weights stay at one and zero on
    purpose, and the statistics follow what trains.
    """
    layers = any(len(p.shape) > 1 and not p.trainable and p.role == "model" for p in record.parameters)
    drifted = [s for s in record.statistics if s.drifted and _frozen(record, s.owner)]
    drifted = [s for s in drifted if layers or record.declared_frozen(s.name)]
    faults = [
        s
        for s in drifted
        if record.declared_frozen(s.name) or (_within_training(record, s) and not _of_a_copy(record, s))
    ]
    return _drift(record, faults), _drift(record, [s for s in drifted if s not in faults])


def _drift(record: Record, drifted: Sequence[Statistics]) -> Drift:
    owners = {s.owner for s in drifted}
    forward = next((f for f in record.root_forwards() if owners & set(f.in_training)), None)
    if forward is None:
        return Drift(tuple(s.name for s in drifted), "")
    calls = [c for c in record.of(ModeCall) if c.on and c.at < forward.at]
    covering = [c for c in calls if not c.below or any(lies_below(record, c.below, owner) for owner in owners)]
    switched = str(covering[-1].place) if covering else ""
    return Drift(tuple(s.name for s in drifted), str(forward.place), switched)


def _frozen(record: Record, owner: str) -> bool:
    """Whether no weight of the norm trains or is written. A norm without weights counts where it is declared frozen."""
    weights = [p for p in record.parameters if p.owner == owner]
    if not weights and record.declared_frozen(owner):
        return True
    changed = record.changed() | record.moved_outside_steps()
    return bool(weights) and not any(p.trainable or p.index in changed for p in weights)


def _of_a_copy(record: Record, statistics: Statistics) -> bool:
    """Whether the norm belongs to a net that began with the weights of one that trains (a target, a momentum encoder):
    it follows at its own pace."""
    part = statistics.owner.split(".")[0]
    mine = [p for p in record.parameters if p.name.split(".")[0] == part and len(p.shape) > 1]
    others = [p for p in record.parameters if p.trainable and p.name.split(".")[0] != part and len(p.shape) > 1]
    return any(p.start.raw and p.start.same(q.start) for p in mine for q in others if p.shape == q.shape)


def _within_training(record: Record, statistics: Statistics) -> bool:
    """Whether the norm runs, with gradients on, within a module other parts of which are trained."""
    trained = {p.owner for p in record.parameters if record.reached(p.index) and p.index in record.held}
    return any(
        statistics.owner in f.in_training and any(lies_below(record, f.module, owner) for owner in trained)
        for f in record.root_forwards()
        if f.grad_enabled
    )


def lies_below(record: Record, root: str, owner: str) -> bool:
    """Whether the module at ``owner`` is the one called ``root`` or lies below it. A root under whose name no parameter
    lies is a whole model, which goes by the name of its class."""
    if owner == root or owner.startswith(f"{root}."):
        return True
    return not any(p.owner == root or p.owner.startswith(f"{root}.") for p in record.parameters)
