"""LoRA adapters and the weights that they adapt. Plain data, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Parameter, Record


def adapters(record: Record) -> list[Parameter]:
    """The parameters of adapters in the model."""
    return [p for p in record.parameters if p.role == "model" and "lora_" in p.name.lower()]


def trained_base(record: Record) -> list[Parameter]:
    """Weights that train although adapters that train are attached to them."""
    stems = {a.name[: a.name.lower().index("lora_")] for a in adapters(record) if a.requires_grad}
    return [
        p
        for p in record.parameters
        if "lora_" not in p.name.lower()
        and p.requires_grad
        and len(p.shape) >= 2
        and any((stem and p.name.startswith(stem)) or p.owner + "." == stem for stem in stems)
        and record.reached(p.index)
        and p.index in record.held
    ]
