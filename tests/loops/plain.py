"""A plain training loop around a model, a batch and a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop


def train(model, optimizer, batches, loss_of):
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def loop(model, batch, loss_of, optimizer=None, **fields):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=batch,
        fit=lambda batches: train(model, optimizer, batches, loss_of),
        **fields,
    )


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def mse(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)
