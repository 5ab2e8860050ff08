"""LoRA: adapters that do not train, and base weights that train beside their adapters. Plain data, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.wording import some, them, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.record import Parameter, Record

_CONSEQUENCES = ("overfit_one_batch", "update_ratio", "every_param_moves")


def adapter_findings(record: Record) -> Iterator[Finding]:
    """LoRA: adapters that do not train, and base weights that train beside their adapters."""
    adapters = [p for p in record.parameters if p.role == "model" and "lora_" in p.name.lower()]
    if not adapters:
        return
    training = [p for p in adapters if p.requires_grad]
    if not training and any(p.requires_grad for p in record.parameters):
        yield Finding(
            cause="adapters_frozen",
            summary=(
                f"the model has {len(adapters)} adapter parameters and none of them requires grad: the adapters "
                "never train"
            ),
            measured=(
                f"0 of {len(adapters)} adapter parameters require grad; "
                f"{sum(p.requires_grad for p in record.parameters)} others do"
            ),
            shown_by="requires_grad is False on every adapter when the loop starts",
            culprits=tuple(p.name for p in adapters[:8]),
            repair=(
                "freeze the base before the adapters are attached, or switch requires_grad on again for the adapters"
            ),
            explains=_CONSEQUENCES,
        )
    base = [
        p for p in record.parameters if _adapted(p, training) and record.reached(p.index) and p.index in record.held
    ]
    if base:
        names = tuple(p.name for p in base)
        yield Finding(
            cause="base_left_trainable",
            summary=(
                f"{some(names)} {verb(names, 'train')} together with the adapters on {them(names)}: the base was "
                "never frozen"
            ),
            measured=(
                f"{len(base)} adapted weights require grad, get gradients and are held by an optimizer; "
                f"{len(training)} adapter parameters"
            ),
            shown_by="the adapted weight and its adapter both receive gradients",
            culprits=names,
            repair="requires_grad_(False) on the base before the optimizer is built, or pass only the adapters to it",
            explains=("frozen_stays_frozen",),
        )


def _adapted(p: Parameter, adapters: Sequence[Parameter]) -> bool:
    """Whether the parameter is a weight that one of the adapters is attached to."""
    if "lora_" in p.name.lower() or not p.requires_grad or len(p.shape) < 2:
        return False
    stems = {a.name[: a.name.lower().index("lora_")] for a in adapters}
    return any((stem and p.name.startswith(stem)) or p.owner + "." == stem for stem in stems)
