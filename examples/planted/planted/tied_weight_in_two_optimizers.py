"""One optimizer for the embeddings and one for the rest, which holds the tied embedding again as the head."""

from collections.abc import Iterable

import torch
from char_gpt.data import Batch
from char_gpt.model import GPT
from char_gpt.train import lm_loss
from torch import nn
from torch.optim import SGD, AdamW


def configure_optimizers(model: GPT) -> list[torch.optim.Optimizer]:
    embeddings = [model.token_embedding, model.position_embedding]
    rest = [model.blocks, model.norm, model.head]
    return [
        SGD([p for module in embeddings for p in module.parameters()], lr=0.1),
        AdamW([p for module in rest for p in module.parameters()], lr=3e-3),
    ]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], batches: Iterable[Batch]) -> None:
    model.train()
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        lm_loss(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
