"""Units that are silent, or at their ends, and are meant to be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.learning.activations_alive.faults import Net
from tests.loops import data
from tests.loops.odd import odd


def labelled(count):
    return [data.labelled(seed=i) for i in range(count)]


def plain(model, optimizer, loss_of, batches=labelled):
    def fit(given):
        for batch in given:
            optimizer.zero_grad()
            loss_of(*batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)


@odd(notes="inputs are never negative, and ReLU follows a layer that starts so: up to half of the units are silent")
def one_sided_inputs():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return plain(model, optimizer, lambda x, y: F.cross_entropy(model(x.abs()), y))


@odd(notes="each row keeps its four largest of 32 units: most are silent for a row, and none for all")
def four_largest_units_of_a_row():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 32), nn.Linear(32, 6)

        def forward(self, x):
            hidden = F.relu(self.encoder(x))
            least = hidden.topk(4, dim=1).values[:, -1:]
            return self.decoder(hidden * (hidden >= least))

    model = Sparse()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return plain(model, optimizer, lambda x, _: F.mse_loss(model(x), x))


@odd(notes="the backbone is frozen, and three quarters of its units are silent")
def frozen_backbone_of_silent_units():
    model = Net(shift=1.0)
    for layer in (model.first, model.second):
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05)
    return plain(model, optimizer, lambda x, y: F.cross_entropy(model(x), y))


@odd(notes="codes of -1 and 1: tanh is steep, and its outputs lie at both ends for each unit")
def steep_tanh_for_codes():
    class Hash(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(torch.tanh(4 * self.encoder(x)))

    model = Hash()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return plain(model, optimizer, lambda x, y: F.cross_entropy(model(x), y))


@odd(notes="states come one by one, without an axis of rows, as an actor-critic meets them in its episode")
def rows_one_by_one():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_of(x, y):
        return torch.stack([F.cross_entropy(model(row), label) for row, label in zip(x, y, strict=True)]).mean()

    return plain(model, optimizer, loss_of)
