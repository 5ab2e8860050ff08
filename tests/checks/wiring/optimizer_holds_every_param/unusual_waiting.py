"""Optimizers that exist and wait: their first step comes after more steps than any run of a test makes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh

CRITIC_FIRST = 500


def cloud(rows=16):
    return torch.randn(rows, 2) * 0.3 + torch.tensor([1.0, -1.0])


def train_gan(generator, critic, opt_g, opt_c, batches):
    for step, real in enumerate(batches):
        fake = generator(torch.randn(len(real), 3))
        loss_c = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        opt_c.zero_grad()
        loss_c.backward()  # also into the generator, whose gradients are cleared before its own pass
        opt_c.step()
        if step >= CRITIC_FIRST:
            loss_g = F.softplus(-critic(generator(torch.randn(len(real), 3)))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()


def gan():
    return relu_mlp(3, 12, 2), relu_mlp(2, 12, 1)


@odd(notes="the critic learns alone for 500 steps; the generator gets gradients, and its optimizer waits inside of fit")
def waiting_optimizer_built_by_fit():
    generator, critic = gan()

    def fit(batches):
        opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3)
        opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3)
        train_gan(generator, critic, opt_g, opt_c, batches)

    return TrainLoop(model=[generator, critic], batch=cloud(), batches=fresh(cloud), fit=fit)


@odd(notes="the same in a trainer that declares the optimizer of the first phase alone")
def waiting_optimizer_of_a_later_phase():
    generator, critic = gan()
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3)
    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=opt_c,
        batch=cloud(),
        batches=fresh(cloud),
        fit=lambda batches: train_gan(generator, critic, opt_g, opt_c, batches),
    )
