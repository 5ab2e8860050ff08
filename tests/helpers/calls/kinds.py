"""The kinds of calls that a training script may make, and what their inputs are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS: dict[str, Callable[[], Any]] = {}
"""By name a function that makes its own inputs, from torch's generator."""


def kind(function: Callable[[], Any]) -> Callable[[], Any]:
    KINDS[function.__name__] = function
    return function


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]
