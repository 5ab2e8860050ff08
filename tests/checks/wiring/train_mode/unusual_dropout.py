"""Dropout in evaluation mode that is meant."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.odd import odd


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(F.dropout(torch.tanh(self.body(x)), 0.2))


@odd(notes="ten passes over the same inputs in evaluation mode are samples, for an uncertainty")
def dropping_for_samples():
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = data.table(seed=1)

    def fit(batches):
        for _ in range(3):
            for inputs, targets in batches:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                drawn = torch.stack([model(x) for _ in range(10)])
                ((drawn.mean(0) - y) ** 2 / drawn.var(0)).mean().item()
            model.train()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(F.dropout(x, 0.3))))


@odd(notes="a denoiser is validated on corrupted inputs, as it is trained")
def dropping_inputs_to_be_restored():
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    held_out = data.table(seed=1)[0]

    def fit(batches):
        for _ in range(3):
            for x, _y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), x).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                F.mse_loss(model(held_out), held_out).item()
            model.train()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="the batch norms are frozen by eval() on the whole backbone, whose functional dropout trains with it")
def dropping_in_a_backbone_in_evaluation_mode():
    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)

        def forward(self, x):
            return F.dropout(self.norm(self.linear(x)).relu(), 0.2)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = Backbone(), nn.Linear(16, 3)

        def train(self, mode=True):
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x):
            return self.head(self.backbone(x))

    model = Model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)
