"""Quantile losses, likelihoods of mixtures and of discrete survival, written by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_formula.faults_likelihoods import regression
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair


def quantiles(sign):
    def loss_of(out, target):
        total = 0.0
        for i, q in enumerate((0.1, 0.5, 0.9)):
            error = target[:, 0] - out[:, i]
            total = total + torch.where(error > 0, q * error, sign * (1 - q) * error).mean()
        return total

    return loss_of


pair(
    "overestimates_pay",
    "loss_formula",
    "term_sign",
    mentions=("0.9", "-0.1"),
    where="torch.where(error > 0",
    faulty=regression(quantiles(1), outputs=3),
    fixed=regression(quantiles(-1), outputs=3),
)


def pairs_of_quantiles(shares):
    def loss_of(out, target):
        tau = (torch.arange(4, dtype=out.dtype) + 0.5) / 4
        errors = target.unsqueeze(1) - out.unsqueeze(2)
        return ((shares(tau) - (errors.detach() < 0).to(out.dtype)).abs() * F.huber_loss(
            out.unsqueeze(2).expand_as(errors), target.unsqueeze(1).expand_as(errors), reduction="none"
        )).sum(1).mean()  # fmt: skip

    return loss_of


def four_values(x):
    return x[:, :1] * 2 + torch.randn(len(x), 4)


pair(
    "shares_along_the_targets",
    "loss_formula",
    "wrong_axes",
    faulty=regression(pairs_of_quantiles(lambda tau: tau), targets=four_values),
    fixed=regression(pairs_of_quantiles(lambda tau: tau[:, None]), targets=four_values),
)


def mixture(density):
    def loss_of(out, target):
        weights, means, log_std = out.chunk(3, 1)
        log_p = -0.5 * ((target[:, :1] - means) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
        return -density(weights, log_p).mean()

    return loss_of


pair(
    "weights_added_to_densities",
    "loss_formula",
    "ingredient_differs",
    faulty=regression(mixture(lambda w, log_p: torch.log((w.softmax(1) + log_p.exp()).sum(1))), outputs=9),
    fixed=regression(mixture(lambda w, log_p: torch.log((w.softmax(1) * log_p.exp()).sum(1))), outputs=9),
)

pair(
    "weights_without_logarithm",
    "loss_formula",
    "parameter_confused",
    level="advice",
    faulty=regression(mixture(lambda w, log_p: (w.softmax(1) + log_p).logsumexp(1)), outputs=9),
    fixed=regression(mixture(lambda w, log_p: (w.log_softmax(1) + log_p).logsumexp(1)), outputs=9),
)


def survival(censored):
    """Rows with a bin each, some of them censored in it."""

    def make():
        x = torch.randn(12, 6)
        time, event = torch.randint(0, 4, (12,)), (torch.rand(12) < 0.6).to(x.dtype)
        event[:2] = torch.tensor([0.0, 1.0], dtype=x.dtype)
        model = relu_mlp(6, 16, 5)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for inputs, bins, observed in batches:
                p = model(inputs).softmax(1)
                at = F.one_hot(bins, 5).to(p.dtype)
                seen = observed * torch.log((at * p).sum(1) + 1e-8)
                left = (1 - observed) * torch.log((censored(at) * p).sum(1) + 1e-8)
                optimizer.zero_grad()
                (-(seen + left).mean()).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(x, time, event), fit=fit)

    return make


pair(
    "censored_as_observed",
    "loss_formula",
    "ingredient_differs",
    where="(seen + left).mean()",
    faulty=survival(lambda at: at),
    fixed=survival(lambda at: 1 - at.cumsum(1)),
)


def separator(cost):
    """Two sources of a mixture, in either order."""

    def make():
        sources = torch.randn(12, 2, 10) * torch.tensor([1.0, 0.2])[:, None]
        sources[::2] = sources[::2].flip(1)
        model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 20), nn.Unflatten(1, (2, 10)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        batches = DataLoader(TensorDataset(sources.sum(1), sources), batch_size=6, shuffle=True)

        def fit(loader):
            for mixed, parts in loader:
                out = model(mixed)
                costs = torch.stack([cost(out, parts), cost(out[:, [1, 0]], parts)], -1)
                optimizer.zero_grad()
                costs.amin(-1).mean().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)

    return make


pair(
    "one_permutation_for_all_rows",
    "loss_formula",
    "mean_taken_early",
    where="costs.amin(-1)",
    faulty=separator(lambda out, parts: (out - parts).square().mean()),
    fixed=separator(lambda out, parts: (out - parts).square().mean((1, 2))),
)


def pixels(flat):
    """Three classes by brightness; the focal loss of flattened scores."""

    def make():
        images = torch.randn(4, 1, 4, 5)
        labels = (images[:, 0] > -0.4).long() + (images[:, 0] > 0.4).long()
        model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for image, label in batches:
                log_p = flat(model(image)).log_softmax(1).gather(1, label.view(-1, 1)).squeeze(1)
                optimizer.zero_grad()
                (-((1 - log_p.exp()) ** 2) * log_p).mean().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(images, labels), fit=fit)

    return make


pair(
    "scores_of_a_pixel_spread_over_several",
    "loss_formula",
    "entries_misaligned",
    where="gather(1, label.view(-1, 1))",
    faulty=pixels(lambda scores: scores.reshape(-1, 3)),
    fixed=pixels(lambda scores: scores.movedim(1, -1).reshape(-1, 3)),
)
