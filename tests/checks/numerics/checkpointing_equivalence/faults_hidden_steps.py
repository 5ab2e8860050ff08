"""Checkpoints that hide from torch what it would refuse: weights that are stepped before the backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from tests.loops.pairs import pair

# A GAN whose generator is judged before the discriminator's step, and backpropagated after it.


class Gan:
    def __init__(self, late):
        self.generator = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        self.of_discriminator = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        self.late = late

    def judge(self, pictures):
        return checkpoint(self.discriminator, pictures, use_reentrant=False)

    def step(self, real):
        made = self.generator(torch.randn(len(real), 4))
        wrong = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(made.detach())).mean()
        self.of_discriminator.zero_grad()
        wrong.backward()
        fooled = F.softplus(-self.judge(made)).mean() if self.late else None
        self.of_discriminator.step()
        if fooled is None:
            fooled = F.softplus(-self.judge(made)).mean()
        self.of_generator.zero_grad()
        fooled.backward()
        self.of_generator.step()


def gan(late):
    def make():
        both = Gan(late)

        def fit(batches):
            for real in batches:
                both.step(real)

        return TrainLoop(
            model={"generator": both.generator, "discriminator": both.discriminator},
            optimizer=[both.of_discriminator, both.of_generator],
            batch=torch.randn(16, 6) + 1.0,
            fit=fit,
        )

    return make


pair(
    "discriminator_stepped_between_forward_and_recomputation",
    "checkpointing_equivalence",
    "state_changed",
    faulty=gan(late=True),
    fixed=gan(late=False),
)
