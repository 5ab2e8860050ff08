"""Backward runs only when a step is due, for the loss of the last micro-batch."""

from collections.abc import Iterable

import torch
from char_gpt.data import Batch
from char_gpt.train import lm_loss
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
    optimizer.zero_grad()
    for i, batch in enumerate(batches, start=1):
        loss = lm_loss(model, batch) / accumulate
        if i % accumulate == 0:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
