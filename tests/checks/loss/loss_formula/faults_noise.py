"""Variational autoencoders whose noise and whose divergence read one output of the encoder in two ways, and others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.pairs import pair
from tests.loops.plain import loop


class Autoencoder(nn.Module):
    def __init__(self, deviation):
        super().__init__()
        self.encoder, self.decoder, self.deviation = mlp(8, 24, 6), mlp(3, 24, 8), deviation

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * self.deviation(spread)
        return self.decoder(code), mean, spread


def by_log_variance(mean, spread):
    return -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1)


def by_log_deviation(mean, spread):
    return -0.5 * (1 + 2 * spread - mean.pow(2) - (2 * spread).exp()).sum(1)


def encoded(deviation, divergence=by_log_variance):
    def make():
        x = torch.randn(10, 8, generator=torch.Generator().manual_seed(1))

        def loss_of(model, batch):
            out, mean, spread = model(batch)
            return (F.mse_loss(out, batch, reduction="none").sum(1) + divergence(mean, spread)).mean()

        return loop(Autoencoder(deviation), x, loss_of)

    return make


# https://github.com/rachtsingh/ibp_vae/issues/3: the noise is scaled by the variance, or by the logarithm itself.

pair(
    "noise_scaled_by_the_variance",
    "loss_formula",
    "parameter_confused",
    change="torch.randn_like(mean)",
    faulty=encoded(lambda spread: spread.exp()),
    fixed=encoded(lambda spread: (0.5 * spread).exp()),
)

pair(
    "noise_scaled_by_a_logarithm",
    "loss_formula",
    "parameter_confused",
    change="torch.randn_like(mean)",
    faulty=encoded(lambda spread: spread, by_log_deviation),
    fixed=encoded(torch.exp, by_log_deviation),
)


@odd(notes="samples are drawn at a lower temperature than that of the posterior")
def noise_at_a_lower_temperature():
    return encoded(lambda spread: 0.7 * (0.5 * spread).exp())()


@odd(notes="the logarithm of the variance is halved by a division")
def deviation_by_a_division():
    return encoded(lambda spread: torch.exp(spread / 2))()


@odd(notes="the deviation is the root of the variance")
def deviation_by_a_root():
    return encoded(lambda spread: spread.exp().sqrt())()


@odd(notes="the deviation is a softplus, and the divergence reads it")
def deviation_by_a_softplus():
    def divergence(mean, spread):
        deviation = F.softplus(spread)
        return 0.5 * (mean.pow(2) + deviation.pow(2) - 1 - 2 * deviation.log()).sum(1)

    return encoded(F.softplus, divergence)()
