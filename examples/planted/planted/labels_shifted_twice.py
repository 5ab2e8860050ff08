"""The data gives each token's successor as its target, and the loss shifts the targets once more."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from char_gpt.data import Batch
from char_gpt.train import windows
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler


def lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


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
            (lm_loss(model, batch) / len(window)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
