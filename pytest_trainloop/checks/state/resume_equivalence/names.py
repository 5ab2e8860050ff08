"""Declared weights and buffers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop import members

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_trainloop.loop import TrainLoop


def declared_weights(loop: TrainLoop) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by name; one that has several names comes with each."""
    for prefix, module in loop.modules.items():
        for name, parameter in members.named_parameters(module, remove_duplicate=False):
            yield f"{prefix}.{name}".lstrip("."), parameter


def declared_tensors(loop: TrainLoop) -> Iterator[tuple[str, torch.Tensor]]:
    yield from declared_weights(loop)
    for prefix, module in loop.modules.items():
        for name, buffer in members.named_buffers(module, remove_duplicate=False):
            yield f"{prefix}.{name}".lstrip("."), buffer


def ties(loop: TrainLoop) -> list[tuple[str, ...]]:
    """Groups of names that share one weight."""
    groups: dict[int, list[str]] = {}
    for name, parameter in declared_weights(loop):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]
