"""Low-rank adapters, written the two ways that projects write them."""

from __future__ import annotations

import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scale


class LoraLayer(nn.Module):
    """The names that PEFT gives."""

    def __init__(self, base_layer: nn.Linear, r: int = 4, lora_alpha: float = 8.0) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base_layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.scaling = lora_alpha / r

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling


def inject(model: nn.Module, targets: tuple[str, ...], layer: type[nn.Module] = LoRALinear) -> int:
    """Wrap every linear layer whose name ends with one of ``targets``; how many were wrapped."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.endswith(targets)]
    for name, linear in found:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer(linear))
    return len(found)
