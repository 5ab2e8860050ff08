"""Weights of 0 and positive inputs that are meant."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_contract.faults_values import loop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


@odd(notes="a void class has weight 0, the others 1 and 2")
def void_class_of_weight_zero() -> TrainLoop:
    x, y = data.labelled(rows=20, classes=4)
    weight = torch.tensor([0.0, 1.0, 2.0, 1.0])
    return loop(mlp(6, 32, 4), {"x": x, "y": y}, lambda model, b: F.cross_entropy(model(b["x"]), b["y"], weight))


@odd(notes="two cross entropies, each of one class alone, are logged apart and added up")
def one_loss_for_each_class() -> TrainLoop:
    x, _ = data.labelled(rows=20)
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])

    def loss_of(model, b):
        scores = model(b["x"])
        return F.cross_entropy(scores, b["y"], first) + 2.0 * F.cross_entropy(scores, b["y"], second)

    return loop(mlp(6, 32, 2), {"x": x, "y": (torch.arange(20) % 2 == 0).long()}, loss_of)


@odd(notes="log-rates begin above 0, since the counts are large")
def positive_logarithms_of_large_rates() -> TrainLoop:
    x, _ = data.labelled(rows=24)
    batch = {"x": x, "y": 20.0 + (torch.arange(24) % 4).float()}
    model = mlp(6, 32, 1)
    torch.nn.init.constant_(list(model.parameters())[-1], 3.0)
    return loop(model, batch, lambda m, b: F.poisson_nll_loss(m(b["x"]).squeeze(-1), b["y"]))


@odd(notes="what is called sigma was squared before")
def squared_sigma_as_variance() -> TrainLoop:
    x, y = data.table()

    def loss_of(model, b):
        mean, raw = model(b["x"]).chunk(2, dim=-1)
        sigma = F.softplus(raw) + 0.1
        sigma = sigma * sigma
        return F.gaussian_nll_loss(mean, b["y"], sigma)

    return loop(mlp(6, 32, 2), {"x": x, "y": y}, loss_of)
