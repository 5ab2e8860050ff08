"""The rate is given in millionths, by a config that means it so, to an optimizer that does not."""

from char_gpt import train
from torch import nn
from torch.optim import AdamW


def configure_optimizer(model: nn.Module, config: train.TrainConfig) -> AdamW:
    optimizer = train.configure_optimizer(model, config)
    for group in optimizer.param_groups:
        group["lr"] *= 1e-6
    return optimizer
