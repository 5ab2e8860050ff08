"""A GAN: two steps of the discriminator for each of the generator, an average of the generator's weights."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


class GAN:
    def __init__(self):
        self.generator, self.discriminator = mlp(8, 2), mlp(2, 1)
        self.average = copy.deepcopy(self.generator).requires_grad_(False)
        self.g_optimizer = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.d_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=4e-3, betas=(0.5, 0.9))
        self.seen = 0

    def train_discriminator(self, real):
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), 8))
        loss = F.relu(1 - self.discriminator(real)).mean() + F.relu(1 + self.discriminator(fake)).mean()
        self.d_optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.5)
        self.d_optimizer.step()

    def train_generator(self, rows):
        loss = -self.discriminator(self.generator(torch.randn(rows, 8))).mean()
        self.g_optimizer.zero_grad()
        loss.backward()
        self.g_optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(self.average.parameters(), self.generator.parameters(), strict=True):
                ours.lerp_(theirs, 0.01)

    def fit(self, batches):
        for (real,) in batches:
            self.train_discriminator(real)
            self.seen += 1
            if self.seen % 2 == 0:
                self.train_generator(len(real))


def make():
    gan = GAN()
    return TrainLoop(
        model={"generator": gan.generator, "discriminator": gan.discriminator, "average": gan.average},
        optimizer=[gan.d_optimizer, gan.g_optimizer],
        batch=(torch.randn(16, 2) * 0.5 + 2,),
        fit=gan.fit,
    )
