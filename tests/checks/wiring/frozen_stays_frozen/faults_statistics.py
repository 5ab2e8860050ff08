"""Running statistics that drift under frozen weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import ConvNet
from tests.loops.pairs import pair

# The features are frozen, and `model.train()` puts their batch norms back to training.


def frozen_features(model):
    for p in model.features.parameters():
        p.requires_grad = False


def train_head(model, optimizer, batches, rest):
    for x, y in batches:
        model.train()
        if rest:
            model.features.eval()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def transfer(rest, declared=()):
    def make():
        model = ConvNet()
        frozen_features(model)
        optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            frozen=declared,
            fit=lambda batches: train_head(model, optimizer, batches, rest),
        )

    return make


pair(
    "features_in_training_mode",
    "frozen_stays_frozen",
    "statistics_drift",
    culprits=("features.1.running_mean", "features.5.running_var"),
    where="model(x)",
    change="model.train()",
    faulty=transfer(rest=False),
    fixed=transfer(rest=True),
)


# A frozen encoder that normalises what it sees by statistics of its own, as agents do with observations.


class Standardised(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.momentum = momentum
        self.body = nn.Linear(6, 16)

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), self.momentum)
        return self.body(x - self.mean).tanh()


def standardised(evaluating):
    def make():
        encoder = Standardised().requires_grad_(False)
        model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(16, 3)})
        optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)

        def fit(batches):
            model.train()
            if evaluating:
                encoder.eval()
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model["head"](encoder(x)), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, frozen=("encoder.",))

    return make


pair(
    "own_statistics_of_a_frozen_encoder",
    "frozen_stays_frozen",
    "statistics_drift",
    culprits=("encoder.mean",),
    faulty=standardised(evaluating=False),
    fixed=standardised(evaluating=True),
)
