"""Gradients that are used while they carry the scale, and losses that one scaler scales and another unscales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.grad_scaler.faults_clips_and_updates import tabular_net
from tests.loops import data
from tests.loops.pairs import pair


def half():
    return torch.autocast("cpu", dtype=torch.float16)


def loop(step):
    def make():
        model = tabular_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                step(model, optimizer, scaler, x, y)
                scaler.step(optimizer)
                scaler.update()

        return TrainLoop(model=model, optimizer=optimizer, scaler=scaler, batch=data.labelled(), fit=fit)

    return make


# The documented trap of a gradient penalty.


def penalised(divided):
    def step(model, optimizer, scaler, x, y):
        x = x.clone().requires_grad_()
        with half():
            loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
        if divided:
            slope = slope / scaler.get_scale()
        with half():
            penalty = (slope.flatten(1).norm(dim=1) - 0.1).square().mean()
        scaler.scale(loss + penalty).backward()

    return step


pair(
    "penalty_of_a_scaled_gradient",
    "grad_scaler",
    "scale_in_loss",
    where="torch.autograd.grad(scaler.scale(loss), x",
    faulty=loop(penalised(divided=False)),
    fixed=loop(penalised(divided=True)),
    quick=True,
)


# Sharpness-aware steps that climb along the scaled gradient.


def climbing(divided):
    def step(model, optimizer, scaler, x, y):
        with half():
            first = F.cross_entropy(model(x), y)
        scaler.scale(first).backward()
        moves = []
        with torch.no_grad():
            for p in model.parameters():
                moves.append(1e-5 * p.grad if not divided else 0.02 * p.grad / scaler.get_scale())
                p.add_(moves[-1])
        optimizer.zero_grad()
        with half():
            second = F.cross_entropy(model(x), y)
        scaler.scale(second).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)

    return step


pair(
    "climb_along_a_scaled_gradient",
    "grad_scaler",
    "scale_in_loss",
    faulty=loop(climbing(divided=False)),
    fixed=loop(climbing(divided=True)),
)


# A scaler each for generator and critic, mixed up in one line.


class Adversaries:
    def __init__(self, mixed):
        self.generator = nn.Linear(4, 2)
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.critic_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.mixed = mixed

    def fit(self, batches):
        for real in batches:
            with half():
                fake = self.generator(torch.randn(len(real), 4))
                worse = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
            self.of_critic.zero_grad()
            self.critic_scaler.scale(worse).backward()
            self.critic_scaler.step(self.of_critic)
            self.critic_scaler.update()
            with half():
                fooled = F.softplus(-self.critic(fake)).mean()
            self.of_generator.zero_grad()
            self.scaler.scale(fooled).backward()
            (self.critic_scaler if self.mixed else self.scaler).step(self.of_generator)
            (self.critic_scaler if self.mixed else self.scaler).update()


def adversaries(mixed):
    def make():
        both = Adversaries(mixed)
        return TrainLoop(
            model={"generator": both.generator, "critic": both.critic},
            optimizer=[both.of_generator, both.of_critic],
            batch=data.ring(),
            fit=both.fit,
        )

    return make


pair(
    "generator_stepped_by_the_critics_scaler",
    "grad_scaler",
    "another_scaler",
    where="(self.critic_scaler if self.mixed else self.scaler).step(",
    faulty=adversaries(mixed=True),
    fixed=adversaries(mixed=False),
    quick=True,
)
