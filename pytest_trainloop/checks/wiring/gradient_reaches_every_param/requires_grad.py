"""Parameters that do not require grad: none does, or one that the declaration does not name. Plain data, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record

_CONSEQUENCES = ("overfit_one_batch", "update_ratio", "every_param_moves")


def nothing_trainable(record: Record) -> Finding | None:
    mine = [p for p in record.parameters if p.role == "model" and p.declared]
    if not mine or any(p.requires_grad for p in mine) or any(record.reached(p.index) for p in record.parameters):
        return None
    if record.changed():
        return None  # an optimizer that needs no gradients
    return Finding(
        cause="nothing_trainable",
        summary=f"nothing trains: none of the {len(mine)} parameters requires grad",
        measured=f"0 of {len(mine)} parameters require grad",
        shown_by="requires_grad is False on every parameter when the loop starts, and no gradient arrives anywhere",
        culprits=tuple(p.name for p in mine[:8]),
        repair="leave requires_grad on for what should train; with adapters: freeze the base first, then attach them",
        explains=_CONSEQUENCES,
    )


def frozen_by_mistake(record: Record) -> Iterator[Finding]:
    """Where ``frozen=`` is declared: weights of torch's own layers that rest without being named in it.

    Without a declaration a frozen layer may be meant; and so may a parameter that a module of the project's own makes
    with
    ``requires_grad=False`` (fixed positions), declared or not.
    """
    if not record.frozen:
        return
    moved = record.moved_outside_steps()
    resting = [
        p
        for p in record.parameters
        if p.declared
        and p.role == "model"
        and p.layer
        and p.calls_with_grad
        and not p.trainable
        and p.index not in moved
    ]
    names = tuple(p.name for p in resting if not record.declared_frozen(p.name))
    if names:
        yield Finding(
            cause="frozen_by_mistake",
            summary=f"{some(names)} {be(names)} frozen and not among what frozen= names: {', '.join(record.frozen)}",
            measured=f"{len(names)} weights of layers do not require grad and lie below none of the declared paths",
            shown_by="their modules run in the training forward pass, and requires_grad is False on them",
            culprits=names,
            repair=(
                "switch requires_grad on for them (a prefix like 'layer1' also matches 'layer10'), or name them in "
                "frozen="
            ),
            explains=_CONSEQUENCES,
        )
