"""Low-rank adapters next to the linear layers of a frozen model."""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def attach(model: nn.Module, targets: Collection[str], rank: int = 8) -> list[str]:
    """Put an adapter next to every linear layer with a name in ``targets``; returns the full names of those layers."""
    attached = []
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank))
                attached.append(f"{path}.{name}")
    return attached


def prepare_finetuning(
    model: nn.Module, targets: Collection[str] = ("qkv", "out", "up", "down"), rank: int = 8
) -> nn.Module:
    """The model with everything frozen but new adapters and its norms."""
    model.requires_grad_(False)
    attach(model, targets, rank)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
    return model
