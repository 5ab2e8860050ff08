"""A classifier whose weights may be of low precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.random_data import fresh, points

BF16 = torch.bfloat16


def train(model, optimizer, batches):
    *_, last = model.parameters()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(last.dtype)).float(), y).backward()
        optimizer.step()


def classifier(make_optimizer, dtype=torch.float32, model=None):
    model = relu_mlp(8, 16, 4).to(dtype) if model is None else model
    optimizer = make_optimizer(model.parameters())
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )
