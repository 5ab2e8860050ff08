"""The schedule advances with every micro-batch, so that it ends too early under accumulation."""

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
        for i, batch in enumerate(window, start=1):
            loss = lm_loss(model, batch) / len(window)
            loss.backward()
            if i == len(window):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if i == len(window) or len(window) > 1:
                scheduler.step()
