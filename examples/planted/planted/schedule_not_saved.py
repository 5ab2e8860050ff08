"""The checkpoint holds the model and the optimizer: after a restart the schedule warms up again."""

from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, _scheduler: LambdaLR) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, _scheduler: LambdaLR) -> None:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
