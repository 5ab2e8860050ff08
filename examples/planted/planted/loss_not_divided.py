"""Accumulation that adds up the losses of a window in place of averaging them."""

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
        for batch in window:
            loss = lm_loss(model, batch)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
