"""Class weights that an integer division left at 0, rates for logarithms, deviations for variances."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.checks.loss.loss_contract.faults_values import loop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# Balanced weights of two classes: total // (classes * count) is 0 for the frequent one.


def rare_positives():
    x, _ = data.labelled(rows=20)
    return {"x": x, "y": (torch.arange(20) % 5 == 0).long()}


def balanced(whole):
    def make():
        batch = rare_positives()
        counts = batch["y"].bincount(minlength=2)
        weight = len(batch["y"]) // (2 * counts) if whole else len(batch["y"]) / (2 * counts)
        criterion = nn.CrossEntropyLoss(weight=weight.float())
        return loop(mlp(6, 32, 2), batch, lambda model, b: criterion(model(b["x"]), b["y"]))

    return make


pair(
    "class_weights_by_integer_division",
    "loss_contract",
    "class_without_weight",
    culprits=("cross_entropy",),
    faulty=balanced(whole=True),
    fixed=balanced(whole=False),
    quick=True,
)


def frequent_positives(whole):
    def make():
        x, _ = data.labelled(rows=20)
        batch = {"x": x, "y": (torch.arange(20) % 5 != 0).float()}
        positive = int(batch["y"].sum())
        ratio = (20 - positive) // positive if whole else (20 - positive) / positive
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(float(ratio)))
        return loop(mlp(6, 32, 1), batch, lambda model, b: criterion(model(b["x"]).squeeze(-1), b["y"]))

    return make


pair(
    "pos_weight_by_integer_division",
    "loss_contract",
    "class_without_weight",
    culprits=("binary_cross_entropy_with_logits",),
    faulty=frequent_positives(whole=True),
    fixed=frequent_positives(whole=False),
)


# Rates with an eps, where their logarithm is taken.


def counts(as_rates):
    def make():
        x, _ = data.labelled(rows=24)
        batch = {"x": x, "y": (torch.arange(24) % 4 == 0).float()}

        def loss_of(model, b):
            rates = F.softplus(model(b["x"]).squeeze(-1)) + 1e-4
            return F.poisson_nll_loss(rates, b["y"], log_input=as_rates)

        return loop(mlp(6, 32, 1), batch, loss_of)

    return make


pair(
    "rates_with_an_eps_as_logarithms",
    "loss_contract",
    "rate_scale",
    culprits=("poisson_nll_loss",),
    faulty=counts(as_rates=True),
    fixed=counts(as_rates=False),
)


# A heteroscedastic head whose deviation is given as it is.


class Heteroscedastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(6, 32, 2)

    def forward(self, x):
        mean, raw = self.body(x).chunk(2, dim=-1)
        return mean, (F.softplus(raw) + 1e-3).sqrt()


def with_deviation(model, b):
    mean, sigma = model(b["x"])
    return F.gaussian_nll_loss(mean, b["y"], sigma)


def with_variance(model, b):
    mean, sigma = model(b["x"])
    return F.gaussian_nll_loss(mean, b["y"], sigma**2)


def heteroscedastic(loss_of):
    def make():
        x, y = data.table()
        return loop(Heteroscedastic(), {"x": x, "y": y}, loss_of)

    return make


pair(
    "deviation_given_as_variance",
    "loss_contract",
    "deviation_for_variance",
    culprits=("gaussian_nll_loss",),
    faulty=heteroscedastic(with_deviation),
    fixed=heteroscedastic(with_variance),
    quick=True,
)
