"""The whole model is cast to bfloat16, weights included: the gains of its norms never move."""

import torch
from torch import nn


def prepare(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)
