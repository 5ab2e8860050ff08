"""Losses and gradients that are not finite, and are made finite before the step."""

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
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


# Every third batch has no positives: its loss is NaN, and is made zero.


def counted(replace):
    def make():
        model = mlp(6, 16, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x, y = data.labelled(classes=2)

        def loss_of(batch):
            inputs, labels = batch
            out = model(inputs).squeeze(1)
            return replace(F.softplus(-out[labels == 1]).mean()) + F.softplus(out[labels == 0]).mean()

        def batches(n):
            return [(x, y if i % 3 else torch.zeros_like(y)) for i in range(n)]

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=batches,
            fit=lambda given: train(optimizer, given, loss_of),
        )

    return make


pair(
    "nan_loss_made_zero",
    "finite",
    "nonfinite_masked",
    culprits=("nan_to_num",),
    where="torch.nan_to_num(part)",
    faulty=counted(lambda part: torch.nan_to_num(part)),
    fixed=counted(lambda part: part if part.isfinite() else torch.zeros(())),
)


# The gradients of one table are NaN, and are set to 0: the step only decays it, as if somebody had frozen it.


class Gated(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.place, self.body, self.eps = nn.Parameter(torch.randn(6)), mlp(6, 16, 3), eps

    def forward(self, x):
        gate = ((0.0 * self.place).square().sum() + self.eps).sqrt()
        return self.body(x + self.place) + gate


def gated(eps):
    def make():
        model = Gated(eps)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for p in model.parameters():
                    torch.nan_to_num_(p.grad, nan=0.0)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "nan_gradients_of_one_table_set_to_zero",
    "finite",
    "nonfinite_masked",
    where="nan_to_num_",
    faulty=gated(eps=0.0),
    fixed=gated(eps=1e-6),
)
