"""Right divergences of variational autoencoders that are one term or one constant from the textbook's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_formula.unusual_fields import Coder, trained
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd


def coded(loss_of):
    return trained(loss_of, torch.randn(8, 6), model=Coder())


@odd(notes="free bits: below a floor for each coordinate the divergence trains nothing")
def divergence_with_free_bits():
    def loss_of(model, x):
        again, mean, log_var = model(x)
        each = 0.5 * (mean.square() + log_var.exp() - 1 - log_var)
        return F.mse_loss(again, x) + 0.1 * each.mean(0).clamp(min=0.1).sum()

    return coded(loss_of)


class TwoLevels(nn.Module):
    """A prior for the lower code is computed from the upper one; the encoder gives the difference from it."""

    def __init__(self, power):
        super().__init__()
        self.encoder, self.prior, self.decoder = relu_mlp(6, 16, 8), relu_mlp(2, 16, 4), relu_mlp(2, 16, 6)
        self.power = power

    def forward(self, x):
        mean, log_std, shift, stretch = self.encoder(x).chunk(4, 1)
        upper = mean + torch.randn_like(mean) * (self.power * log_std).exp()
        prior_mean, prior_log_std = self.prior(upper).chunk(2, 1)
        lower = prior_mean + shift + torch.randn_like(shift) * (self.power * (prior_log_std + stretch)).exp()
        return self.decoder(lower), (mean, log_std), (shift, stretch, prior_mean, prior_log_std)


def two_levels(loss_of, power=1):
    """``power``: a deviation is the exponential of so many times what the encoder gives."""
    return trained(loss_of, torch.randn(8, 6), model=TwoLevels(power))


@odd(notes="the same by log-variances: what takes the mean's place is a square already")
def relative_divergence_by_log_variances():
    def loss_of(model, x):
        again, (mean, log_var), (shift, ratio, _, prior_log_var) = model(x)
        distance = shift.pow(2) / prior_log_var.exp()
        lower = -0.5 * (1 + ratio - distance - ratio.exp())
        upper = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp())
        return F.mse_loss(again, x) + 0.1 * (upper.sum(1) + lower.sum(1)).mean()

    return two_levels(loss_of, power=0.5)


@odd(notes="both sides of the divergence are learned (ladder VAE): the prior's spread is below the bar")
def divergence_of_two_learned_normals():
    def loss_of(model, x):
        again, (mean, log_std), (shift, stretch, prior_mean, prior_log_std) = model(x)
        here, log_here = prior_mean + shift, prior_log_std + stretch
        lower = prior_log_std - log_here - 0.5
        lower = lower + ((2 * log_here).exp() + (here - prior_mean).square()) / (2 * (2 * prior_log_std).exp())
        upper = 0.5 * (mean.square() + torch.exp(2 * log_std) - 1) - log_std
        return F.mse_loss(again, x) + 0.1 * (upper.sum(1) + lower.sum(1)).mean()

    return two_levels(loss_of)


@odd(notes="balanced divergences (Dreamer): one side is stopped in each of two")
def divergences_balanced():
    def loss_of(model, x):
        again, (mean, log_std), (_, _, prior_mean, prior_log_std) = model(x)
        posterior, prior = (mean, log_std.exp()), (prior_mean, prior_log_std.exp())
        stopped = [tuple(t.detach() for t in side) for side in (posterior, prior)]
        of_prior = kl_divergence(Normal(*stopped[0]), Normal(*prior)).sum(1).mean()
        of_posterior = kl_divergence(Normal(*posterior), Normal(*stopped[1])).sum(1).mean()
        return F.mse_loss(again, x) + 0.8 * of_prior.clamp(min=0.1) + 0.2 * of_posterior.clamp(min=0.1)

    return two_levels(loss_of)


def log_density(z, mean, log_var):
    return -0.5 * (math.log(2 * math.pi) + log_var + (z - mean).square() / log_var.exp())


class Sampler(Coder):
    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var, z


@odd(notes="total correlation (beta-TCVAE): densities of all rows under all others, added and taken away")
def total_correlation():
    def loss_of(model, x):
        again, mean, log_var, z = model(x)
        pairs = log_density(z[:, None], mean[None], log_var[None])
        own = log_density(z, mean, log_var).sum(1)
        prior = log_density(z, torch.zeros_like(z), torch.zeros_like(z)).sum(1)
        joint = pairs.sum(2).logsumexp(1) - math.log(len(x))
        product = (pairs.logsumexp(1) - math.log(len(x))).sum(1)
        parts = (own - joint) + 6.0 * (joint - product) + (product - prior)
        return F.mse_loss(again, x) + 0.1 * parts.mean()

    made = trained(loss_of, torch.randn(8, 6), model=Sampler())
    return TrainLoop(model=made.model, optimizer=made.optimizer, batch=made.batch, fit=made.fit, rows_interact=True)


@odd(notes="one sample in place of the integral: the logarithm of the posterior's density is lowered")
def divergence_by_one_sample():
    def loss_of(model, x):
        again, mean, log_var, z = model(x)
        own = (-0.5 * (log_var + (z - mean).square() / log_var.exp())).sum(1)
        prior = (-0.5 * z.square()).sum(1)
        return F.mse_loss(again, x) + 0.1 * (own - prior).mean()

    return trained(loss_of, torch.randn(8, 6), model=Sampler())
