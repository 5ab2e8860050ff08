"""The optimizer steps on cleared gradients; those of the batch come after."""

from collections.abc import Iterable

import torch
from char_gpt.data import Batch
from char_gpt.train import lm_loss, windows
from torch import nn
from torch.optim.lr_scheduler import LRScheduler


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    accumulate: int,
    scheduler: LRScheduler,
) -> None:
    model.train()
    for window in windows(batches, accumulate):
        optimizer.zero_grad()
        losses = [lm_loss(model, batch) for batch in window]
        optimizer.step()
        torch.stack(losses).mean().backward()
        scheduler.step()
