"""The rate of a run with plain gradient descent, given to AdamW."""

from char_gpt import train
from torch import nn
from torch.optim import AdamW


def configure_optimizer(model: nn.Module, config: train.TrainConfig) -> AdamW:
    optimizer = train.configure_optimizer(model, config)
    for group in optimizer.param_groups:
        group["lr"] = 10.0
    return optimizer
