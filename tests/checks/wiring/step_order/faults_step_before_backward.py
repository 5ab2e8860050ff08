"""Steps between forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair

# Regression: with zeros in place of None, and where torch notices the changed weights.


def train_mlp_stepping_first(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), y)
        optimizer.step()
        loss.backward()


def train_mlp_step_zero_backward(model, optimizer, batches):
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        optimizer.step()
        loss.backward()


def train_mlp_forward_step_backward(model, optimizer, batches):
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()


def train_mlp(model, optimizer, batches):
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def regression(train):
    def make():
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            batches=lambda n: [data.table(seed=i) for i in range(n)],
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


for name, train, complaint in (
    ("zero_forward_step_backward", train_mlp_stepping_first, "modified by an inplace operation"),
    ("forward_zero_step_backward", train_mlp_step_zero_backward, None),
    ("forward_step_zero_backward", train_mlp_forward_step_backward, "modified by an inplace operation"),
):
    pair(
        f"mlp_{name}",
        "step_order",
        "step_before_backward",
        where="optimizer.step()",
        raises=complaint,
        faulty=regression(train),
        fixed=regression(train_mlp),
    )
