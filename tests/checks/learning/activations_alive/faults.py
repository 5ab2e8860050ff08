"""Layers most of whose units no longer say anything."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


class Net(nn.Module):
    def __init__(self, activation=F.relu, shift=0.0):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.second = nn.Linear(32, 32)
        self.head = nn.Linear(32, 3)
        self.activation = activation
        with torch.no_grad():
            self.second.bias -= shift

    def forward(self, x):
        hidden = self.activation(self.first(x))
        return self.head(self.activation(self.second(hidden)))


def loop(model_of=Net, rate=0.05, prepared=lambda x: x, optimizer_of=torch.optim.SGD):
    def make():
        model = model_of()
        optimizer = optimizer_of(model.parameters(), lr=rate)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(prepared(x)), y).backward()
                optimizer.step()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=lambda n: [data.labelled(seed=i) for i in range(n)],
            fit=fit,
        )

    return make


# A threshold that an earlier version needed: three quarters of the units never pass it.

pair(
    "bias_far_below_zero",
    "activations_alive",
    "dead_from_the_start",
    level="advice",
    culprits=("second",),
    where="self.activation(self.second(hidden))",
    change="self.second = nn.Linear(32, 32)",
    quick=True,
    faulty=loop(lambda: Net(shift=1.0)),
    fixed=loop(Net),
)


# Brightness in bytes, as it is read from the file.


def in_bytes(x):
    return (32 * x + 128).round().clamp(0, 255)


def scaled(x):
    return (in_bytes(x) - 128) / 32


pair(
    "pixels_as_bytes_into_tanh",
    "activations_alive",
    "saturated",
    level="advice",
    culprits=("first",),
    where="self.activation(self.first(x))",
    change="model(prepared(x))",
    quick=True,
    faulty=loop(lambda: Net(torch.tanh), prepared=in_bytes),
    fixed=loop(lambda: Net(torch.tanh), prepared=scaled),
)


# The same bytes into ReLU: the first steps push nearly all units below zero.

pair(
    "pixels_as_bytes_into_relu",
    "activations_alive",
    "dies_in_training",
    level="advice",
    culprits=("first",),
    where="self.activation(self.first(x))",
    change="model(prepared(x))",
    quick=True,
    faulty=loop(Net, prepared=in_bytes),
    fixed=loop(Net, prepared=scaled),
)
