"""SGD with momentum written by hand, which goes through its first parameter group only."""

from collections.abc import Callable
from typing import Any

import torch
from digits_cnn import trainer


class SGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        group = self.param_groups[0]
        for parameter in group["params"]:
            gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            mean.mul_(group["momentum"]).add_(gradient)
            parameter.sub_(mean, alpha=group["lr"])


class Trainer(trainer.Trainer):
    def configure_optimizer(self) -> SGD:
        groups = super().configure_optimizer().param_groups
        return SGD([{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups], self.config.rate, 0.9)
