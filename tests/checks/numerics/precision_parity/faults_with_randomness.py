"""Low precision at fault in loops that draw: dropout, noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.precision_parity.faults_autocast import autocast
from tests.loops.pairs import pair

# Scores that overflow under dropout of the attention weights, with a scaler.


class Scores(nn.Module):
    def __init__(self, large):
        super().__init__()
        self.qkv, self.out, self.large = nn.Linear(24, 72), nn.Linear(24, 24), large

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) * (6e4 if self.large else 24**-0.5)
        return self.out(F.dropout(scores.softmax(-1), 0.2, self.training) @ v)


def scored(large):
    def make(precision="fp16"):
        model = nn.Sequential(nn.Linear(6, 24), Scores(large), nn.Linear(24, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=precision == "fp16")
        x = torch.randn(4, 10, 6)

        def fit(batches):
            for x in batches:
                with autocast(precision):
                    loss = F.mse_loss(model(x).float(), x)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, scaler=scaler, batch=x, fit=fit)

    return make


pair(
    "scores_overflow_under_dropout",
    "precision_parity",
    "overflow",
    culprits=("1",),
    where="scores = q @ k",
    faulty=scored(large=True),
    fixed=scored(large=False),
    quick=True,
)
