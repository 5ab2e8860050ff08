"""A freeze that sets an attribute of a module, and nothing of its parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop
from tests.loops.random_data import fresh, points


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.outc = mlp(8, 24, 24), nn.Linear(24, 4)

    def forward(self, x):
        return self.outc(self.body(x))


def adapted(freeze):
    """The classifier holds the prototypes, and is to stay as it is."""

    def make():
        model = Segmenter()
        freeze(model.outc)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        return loop(model, points(), cross_entropy, optimizer, batches=fresh(points))

    return make


def by_an_attribute(module):
    module.requires_grad = False


pair(
    "classifier_frozen_by_an_attribute",
    "frozen_stays_frozen",
    "freeze_sets_an_attribute",
    level="advice",
    culprits=("outc.weight", "outc.bias"),
    faulty=adapted(by_an_attribute),
    fixed=adapted(lambda module: module.requires_grad_(False)),
)


def all_but_the_head(freeze):
    def make():
        model = Segmenter()
        for child in (model.body[0], model.body[2]):
            freeze(child)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            model.train()
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)

    return make


pair(
    "layers_frozen_by_an_attribute",
    "frozen_stays_frozen",
    "freeze_sets_an_attribute",
    level="advice",
    culprits=("body.0.weight", "body.0.bias"),
    faulty=all_but_the_head(by_an_attribute),
    fixed=all_but_the_head(lambda module: module.requires_grad_(False)),
)
