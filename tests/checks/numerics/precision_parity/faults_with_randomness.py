"""Low precision at fault in loops that draw: dropout, noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.precision_parity.faults_autocast import autocast
from tests.loops import data
from tests.loops.pairs import pair

# A norm by hand behind dropout, over activations with a mean of 30: E[x^2] - E[x]^2 cancels.


class NormByHand(nn.Module):
    def __init__(self, centred):
        super().__init__()
        self.centred = centred

    def forward(self, x):
        x = (x.float() if self.centred else x) + 30.0
        mean = x.mean(-1, keepdim=True)
        var = (x - mean).square().mean(-1, keepdim=True) if self.centred else self.variance(x, mean)
        return (x - mean) / (var.abs() + 1e-5).sqrt()

    @staticmethod
    def variance(x, mean):
        return (x * x).mean(-1, keepdim=True) - mean * mean


def behind_dropout(centred):
    def make(precision="bf16"):
        model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.1), NormByHand(centred), nn.Linear(64, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "norm_by_hand_behind_dropout",
    "precision_parity",
    "cancellation",
    culprits=("2",),
    where="(x * x).mean",
    faulty=behind_dropout(centred=False),
    fixed=behind_dropout(centred=True),
)


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
