"""Parameters that do not require grad: all, or some that the declaration does not name. Plain data, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Parameter, Record


def untrainable_model(record: Record) -> list[Parameter]:
    """The parameters of a model none of which requires grad, where no gradient arrives anywhere and nothing moves (an
    optimizer may need no gradients)."""
    mine = [p for p in record.parameters if p.role == "model" and p.declared]
    trains = any(p.requires_grad for p in mine) or any(record.reached(p.index) for p in record.parameters)
    return [] if trains or record.changed() else mine


def frozen_by_mistake(record: Record) -> tuple[str, ...]:
    """Weights of torch's own layers that are frozen without being named in ``frozen=``.

    Without that declaration a frozen layer may be meant. So may, declared or not, a parameter that a module of the
    project's own makes with ``requires_grad=False`` (fixed positions).
    """
    moved = record.moved_outside_steps()
    return tuple(
        p.name
        for p in record.parameters
        if record.frozen
        and p.declared
        and p.role == "model"
        and p.layer
        and p.calls_with_grad
        and not p.trainable
        and p.index not in moved
        and not record.declared_frozen(p.name)
    )
