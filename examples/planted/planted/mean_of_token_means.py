"""Sequences of unequal length, and a mean over tokens taken for each micro-batch by itself."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from char_gpt.data import Batch
from char_gpt.train import windows
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

IGNORED = -100


def padded(batch: Batch) -> Batch:
    """The crops cut to unequal lengths: targets beyond the end are ignored."""
    tokens, targets = batch
    rows, context = tokens.shape
    lengths = context - (torch.arange(rows) * 5) % (context - 2)
    return tokens, targets.masked_fill(torch.arange(context) >= lengths[:, None], IGNORED)


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
        for tokens, targets in window:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            (loss / len(window)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
