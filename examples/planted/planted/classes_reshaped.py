"""cross_entropy wants the classes on axis 1; they are brought there by a reshape in place of a transpose."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from char_gpt.data import Batch
from char_gpt.train import windows
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler


def lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    logits = model(tokens)
    rows, length, classes = logits.shape
    return F.cross_entropy(logits.reshape(rows, classes, length), targets)


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
