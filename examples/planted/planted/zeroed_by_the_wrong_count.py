"""Zeroing counts optimizer steps where it should count micro-batches: windows run into each other."""

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
    steps = 0
    optimizer.zero_grad()
    for i, batch in enumerate(batches, start=1):
        loss = lm_loss(model, batch) / accumulate
        loss.backward()
        if i % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            steps += 1
            if steps % accumulate == 0:
                optimizer.zero_grad()
