"""Likelihoods and divergences written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def regression(loss_of, *, outputs=4, targets=lambda x: x[:, :2] * 2 + 0.3 * torch.randn(len(x), 2)):
    """A net with ``outputs`` outputs on eight inputs."""

    def make():
        x = torch.randn(8, 6)
        y = targets(x)
        model = relu_mlp(6, 16, outputs)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return loop(model, (x, y), lambda model, batch: loss_of(model(batch[0]), batch[1]), optimizer)

    return make


class VAE(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.encoder, self.decoder, self.power = relu_mlp(6, 16, 4), relu_mlp(2, 16, 6), power

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(self.power * log_var)
        return self.decoder(z), mean, log_var


def autoencoder(divergence, power=0.5):
    """``power``: the deviation is the exponential of so many times what the encoder gives."""

    def make():
        model = VAE(power)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for x in batches:
                again, mean, log_var = model(x)
                loss = F.mse_loss(again, x, reduction="sum") / len(x) + 0.1 * divergence(mean, log_var)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(8, 6), fit=fit)

    return make


def kingma(mean, log_var):
    return -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp()) / len(mean)


pair(
    "mean_of_the_divergence_not_squared",
    "loss_formula",
    "power_differs",
    quick=True,
    where="-0.5 * torch.sum(1 + log_var - mean - log_var.exp())",
    faulty=autoencoder(lambda mean, log_var: -0.5 * torch.sum(1 + log_var - mean - log_var.exp()) / len(mean)),
    fixed=autoencoder(kingma),
)

pair(
    "variance_with_the_other_sign",
    "loss_formula",
    "term_sign",
    faulty=autoencoder(lambda mean, log_var: -0.5 * torch.mean(1 + log_var - mean**2 + log_var.exp())),
    fixed=autoencoder(lambda mean, log_var: -0.5 * torch.mean(1 + log_var - mean**2 - log_var.exp())),
)

pair(
    "deviation_where_the_variance_belongs",
    "loss_formula",
    "parameter_confused",
    quick=True,
    faulty=autoencoder(lambda mean, log_var: -0.5 * torch.sum(1 + log_var - mean**2 - (log_var / 2).exp())),
    fixed=autoencoder(lambda mean, log_var: -0.5 * torch.sum(1 + log_var - mean**2 - log_var.exp())),
)


def of_a_tutorial(half):
    def divergence(mean, log_var):
        sigma = torch.exp(0.5 * log_var)
        return (half * (sigma**2 + mean**2) - torch.log(sigma) - 1 / 2).sum()

    return divergence


pair(
    "half_missing_before_the_squares",
    "loss_formula",
    "factor_missing",
    faulty=autoencoder(of_a_tutorial(1.0)),
    fixed=autoencoder(of_a_tutorial(0.5)),
)


pair(
    "deviation_in_a_divergence_by_its_logarithm",
    "loss_formula",
    "factor_missing",
    faulty=autoencoder(lambda mean, log_std: -0.5 * torch.sum(1 + 2 * log_std - mean**2 - log_std.exp()), 1),
    fixed=autoencoder(lambda mean, log_std: -0.5 * torch.sum(1 + 2 * log_std - mean**2 - log_std.exp() ** 2), 1),
)


def evidence_bound(sign):
    def divergence(mean, log_var):
        return sign * 0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()

    return divergence


pair(
    "divergence_with_its_sign_turned",
    "loss_formula",
    "sign_flipped",
    where="(1 + log_var - mean.pow(2) - log_var.exp())",
    faulty=autoencoder(evidence_bound(1)),
    fixed=autoencoder(evidence_bound(-1)),
)
