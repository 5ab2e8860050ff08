"""Faults in loops that hand their step a closure: the backward pass comes inside the step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            return loss

        optimizer.step(closure)


# Features detached for a plot, under LBFGS.


def fitted(detached):
    def make():
        model = mlp(6, 16, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

        def loss_of(batch):
            x, y = batch
            features = model[1](model[0](x))
            if detached:
                features = features.detach()
            return F.mse_loss(model[2](features), y)

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            fit=lambda batches: train(optimizer, batches, loss_of),
        )

    return make


pair(
    "detached_inside_a_closure",
    "gradient_reaches_every_param",
    "graph_cut",
    culprits=("0.weight", "0.bias"),
    where="features.detach()",
    faulty=fitted(detached=True),
    fixed=fitted(detached=False),
)


# Norm gains in bfloat16, stepped by closures as Lightning does.


def normed(dtype):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 3)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(
                optimizer, batches, lambda batch: F.cross_entropy(model(batch[0].to(dtype)).float(), batch[1])
            ),
        )

    return make


pair(
    "bfloat16_gains_by_closures",
    "every_param_moves",
    "lost_to_rounding",
    culprits=("1.weight",),
    faulty=normed(torch.bfloat16),
    fixed=normed(torch.float32),
)
