"""Positive and negative sides whose values fall for the positive one, on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def triplets(loss_of, model=None):
    g = torch.Generator().manual_seed(2)
    anchor = torch.randn(8, 6, generator=g)
    batch = {"anchor": anchor, "pos": anchor + 0.2, "neg": torch.randn(8, 6, generator=g)}
    net = mlp(6, 16, 8) if model is None else model
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    return loop(net, batch, loss_of, optimizer)


@odd(notes="squared distances are written as products: that of the positive falls")
def distances_written_as_products() -> TrainLoop:
    def squared(a, b):
        return ((a - b) * (a - b)).sum(-1)

    def loss_of(net, b):
        a, p, n = net(b["anchor"]), net(b["pos"]), net(b["neg"])
        return (squared(a, p) - squared(a, n) + 1).relu().mean()

    return triplets(loss_of)


@odd(notes="one minus the cosine is a distance: that of the positive falls")
def cosine_distances_of_named_sides() -> TrainLoop:
    def loss_of(net, b):
        a, p, n = net(b["anchor"]), net(b["pos"]), net(b["neg"])
        return F.softplus((1 - F.cosine_similarity(a, p)) - (1 - F.cosine_similarity(a, n))).mean()

    return triplets(loss_of)


@odd(notes="a learned layer gives an energy, which is low for what belongs together")
def energies_of_named_sides() -> TrainLoop:
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp(12, 16, 8), nn.Linear(8, 1)

        def forward(self, a, b):
            return self.head(self.body(torch.cat([a, b], 1)).tanh()).squeeze(1)

    def loss_of(net, b):
        return F.softplus(net(b["anchor"], b["pos"]) - net(b["anchor"], b["neg"])).mean()

    return triplets(loss_of, Energy())


@odd(notes="a negative product in the Lorentz model is a distance, with a metric of -1 and 1 among its factors")
def lorentz_distances_of_named_sides() -> TrainLoop:
    metric = torch.cat([-torch.ones(1), torch.ones(8)])

    def lifted(v):
        return torch.cat([(1 + v.square().sum(-1, keepdim=True)).sqrt(), v], -1)

    def distance(a, b):
        return (-lifted(a) * metric * lifted(b)).sum(-1)

    def loss_of(net, b):
        a, p, n = net(b["anchor"]), net(b["pos"]), net(b["neg"])
        return (distance(a, p) - distance(a, n) + 1).relu().mean()

    return triplets(loss_of)
