"""Adversarial training with the later tricks: lazy regularisation, averaged copies, computed weights."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


@torch.no_grad()
def accumulate_ema(average, model, decay=0.9):
    for kept, live in zip(average.parameters(), model.parameters(), strict=True):
        kept.mul_(decay).add_(live, alpha=1 - decay)


def train_stylegan(generator, discriminator, average, opt_g, opt_d, batches, gamma=1.0, every=4):
    for i, real in enumerate(batches):
        generator.requires_grad_(False), discriminator.requires_grad_(True)
        fake = generator(torch.randn(len(real), 4))
        d_loss = F.softplus(discriminator(fake)).mean() + F.softplus(-discriminator(real)).mean()
        discriminator.zero_grad()
        d_loss.backward()
        opt_d.step()

        if i % every == 0:
            real = real.detach().requires_grad_(True)
            score = discriminator(real)
            (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            r1 = slope.square().flatten(1).sum(1).mean()
            discriminator.zero_grad()
            (gamma / 2 * r1 * every + 0 * score[0, 0]).backward()
            opt_d.step()

        generator.requires_grad_(True), discriminator.requires_grad_(False)
        g_loss = F.softplus(-discriminator(generator(torch.randn(len(real), 4)))).mean()
        generator.zero_grad()
        g_loss.backward()
        opt_g.step()
        accumulate_ema(average, generator)


@odd(
    notes="a regulariser steps alone on every fourth batch and multiplies the score by 0; "
    "an averaged copy, never frozen"
)
def gan_lazy_r1_with_average() -> TrainLoop:
    generator, discriminator = relu_mlp(4, 16, 8), relu_mlp(8, 16, 1)
    average = copy.deepcopy(generator).eval()
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.0, 0.99))
    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator, "average": average},
        optimizer=[opt_g, opt_d],
        batch=points()[0],
        fit=lambda batches: train_stylegan(generator, discriminator, average, opt_g, opt_d, batches),
    )


class SpectralCritic(nn.Module):
    def __init__(self, width=8, hidden=16, classes=4):
        super().__init__()
        self.body = nn.Sequential(spectral_norm(nn.Linear(width, hidden)), nn.LeakyReLU(0.1))
        self.score = spectral_norm(nn.Linear(hidden, 1))
        self.classes = spectral_norm(nn.Embedding(classes, hidden))

    def forward(self, x, y):
        h = self.body(x)
        return self.score(h).squeeze(1) + (self.classes(y) * h).sum(1)


class ConditionalGenerator(nn.Module):
    def __init__(self, latent=4, classes=4, hidden=16, width=8):
        super().__init__()
        self.classes = nn.Embedding(classes, latent)
        self.body = mlp(2 * latent, hidden, width, activation=nn.ReLU)

    def forward(self, noise, y):
        return self.body(torch.cat([noise, self.classes(y)], 1))


def train_hinge(generator, critic, opt_g, opt_d, batches):
    for x, y in batches:
        fake = generator(torch.randn(len(x), 4), y).detach()
        loss = F.relu(1 - critic(x, y)).mean() + F.relu(1 + critic(fake, y)).mean()
        opt_d.zero_grad()
        loss.backward()
        opt_d.step()
        opt_g.zero_grad()
        (-critic(generator(torch.randn(len(x), 4), y), y).mean()).backward()
        opt_g.step()


@odd(notes="spectral norm with a projection critic: weights are computed in forward; hinge loss can be exactly flat")
def sngan_projection_hinge() -> TrainLoop:
    generator, critic = ConditionalGenerator(), SpectralCritic()
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.0, 0.9))
    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=[opt_g, opt_d],
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_hinge(generator, critic, opt_g, opt_d, batches),
    )


class EnergyBuffer:
    """Persistent chains of an energy-based model: most samples go on from earlier ones."""

    def __init__(self, width, size=32):
        self.chains = torch.randn(size, width)

    def draw(self, n):
        index = torch.randint(len(self.chains), (n,))
        start = self.chains[index]
        restart = torch.rand(n) < 0.1
        return torch.where(restart[:, None], torch.randn_like(start), start), index

    def put(self, index, samples):
        self.chains[index] = samples


def langevin(energy, x, steps=3, size=0.1):
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(energy(x).sum(), x)
        x = x - size * slope + 0.05 * torch.randn_like(x)
    return x.detach()


def train_energy(energy, optimizer, batches, width=8):
    buffer = EnergyBuffer(width)
    for real in batches:
        start, index = buffer.draw(len(real))
        energy.requires_grad_(False)
        fake = langevin(energy, start)
        energy.requires_grad_(True)
        buffer.put(index, fake)
        up, down = energy(real), energy(fake)
        loss = up.mean() - down.mean() + 0.1 * (up.square() + down.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(
    notes="the loss is a difference that does not fall; samples come from gradient steps on the input of the frozen net"
)
def energy_based_model() -> TrainLoop:
    energy = mlp(8, 16, 1, activation=nn.SiLU)
    optimizer = torch.optim.Adam(energy.parameters(), lr=2e-3, betas=(0.0, 0.999))
    return TrainLoop(
        model=energy,
        optimizer=optimizer,
        batch=points()[0],
        batches=fresh(lambda: points()[0]),
        fit=lambda batches: train_energy(energy, optimizer, batches),
    )
