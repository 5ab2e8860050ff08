"""Games of two networks in which both steps pull in one direction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair
from tests.loops.random_data import fresh, points


def pictures():
    return points()[0]


def game(fit, *, critic=lambda: relu_mlp(8, 16, 1)):
    """A generator from noise of width 4 to points of width 8, and what judges them; ``fit`` gets both and both
    optimizers."""

    def make():
        generator, judge = relu_mlp(4, 16, 8), critic()
        opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return TrainLoop(
            model={"generator": generator, "discriminator": judge},
            optimizer=[opt_g, opt_d],
            batch=pictures(),
            batches=fresh(pictures),
            fit=lambda batches: fit(generator, judge, opt_g, opt_d, batches),
        )

    return make


def by_labels(criterion, label_of_made, *, label_of_data=1.0, aim=1.0):
    """The loop of most tutorials."""

    def fit(generator, discriminator, opt_g, opt_d, batches):
        for real in batches:
            made = generator(torch.randn(len(real), 4))
            opt_d.zero_grad()
            on_data, on_made = discriminator(real), discriminator(made.detach())
            loss_d = criterion(on_data, torch.full_like(on_data, label_of_data)) + criterion(
                on_made, torch.full_like(on_made, label_of_made)
            )
            loss_d.backward()
            opt_d.step()

            opt_g.zero_grad()
            again = discriminator(made)
            criterion(again, torch.full_like(again, aim)).backward()
            opt_g.step()

    return fit


pair(
    "generator_aims_at_the_label_of_made_pictures",
    "adversaries_oppose",
    "maker_helps_critic",
    culprits=("discriminator",),
    where="again = discriminator(made)",
    faulty=game(by_labels(F.binary_cross_entropy_with_logits, 0.0, aim=0.0)),
    fixed=game(by_labels(F.binary_cross_entropy_with_logits, 0.0)),
    quick=True,
)


def minimax(sign):
    """The generator's loss as in the paper: the logarithm of one minus the score."""

    def fit(generator, discriminator, opt_g, opt_d, batches):
        for real in batches:
            opt_d.zero_grad()
            noise = torch.randn(len(real), 4)
            with torch.no_grad():
                made = generator(noise)
            loss = -torch.log(discriminator(real)).mean() - torch.log(1 - discriminator(made)).mean()
            loss.backward()
            opt_d.step()

            opt_g.zero_grad()
            score = discriminator(generator(noise))
            (sign * torch.log(1 - score).mean()).backward()
            opt_g.step()

    return fit


pair(
    "minimax_generator_climbs",
    "adversaries_oppose",
    "maker_helps_critic",
    culprits=("discriminator",),
    where="score = discriminator(generator(noise))",
    faulty=game(minimax(-1), critic=lambda: nn.Sequential(relu_mlp(8, 16, 1), nn.Sigmoid())),
    fixed=game(minimax(1), critic=lambda: nn.Sequential(relu_mlp(8, 16, 1), nn.Sigmoid())),
)


def hinge(on_made):
    def fit(generator, discriminator, opt_g, opt_d, batches):
        for real in batches:
            opt_d.zero_grad()
            made = generator(torch.randn(len(real), 4))
            loss = F.relu(1 - discriminator(real)).mean() + on_made(discriminator(made.detach()))
            loss.backward()
            opt_d.step()
            opt_g.zero_grad()
            (-discriminator(made)).mean().backward()
            opt_g.step()

    return fit


pair(
    "hinge_of_made_pictures_without_its_sign",
    "adversaries_oppose",
    "critic_cannot_tell",
    culprits=("discriminator",),
    faulty=game(hinge(lambda scores: F.relu(1 - scores).mean())),
    fixed=game(hinge(lambda scores: F.relu(1 + scores).mean())),
)


def summed(between):
    def fit(generator, critic, opt_g, opt_d, batches):
        for real in batches:
            made = generator(torch.randn(len(real), 4))
            opt_d.zero_grad()
            between(critic(real).mean(), critic(made.detach()).mean()).backward()
            opt_d.step()
            opt_g.zero_grad()
            (-critic(made).mean()).backward()
            opt_g.step()

    return fit


pair(
    "wasserstein_critic_adds_both_scores",
    "adversaries_oppose",
    "critic_cannot_tell",
    culprits=("discriminator",),
    where="between(critic(real).mean(), critic(made.detach()).mean())",
    faulty=game(summed(lambda data, made: made + data)),
    fixed=game(summed(lambda data, made: made - data)),
    quick=True,
)


def in_turn(*, clear_before):
    def fit(generator, discriminator, opt_g, opt_d, batches):
        criterion = nn.BCEWithLogitsLoss()
        for real in batches:
            valid, fake = torch.ones(len(real), 1), torch.zeros(len(real), 1)

            opt_g.zero_grad()
            made = generator(torch.randn(len(real), 4))
            g_loss = criterion(discriminator(made), valid)
            g_loss.backward()
            opt_g.step()

            if clear_before:
                opt_d.zero_grad()
            d_loss = (criterion(discriminator(real), valid) + criterion(discriminator(made.detach()), fake)) / 2
            d_loss.backward()
            opt_d.step()
            if not clear_before:
                opt_d.zero_grad()

    return fit


pair(
    "critic_is_cleared_behind_its_step",
    "adversaries_oppose",
    "gradients_mixed",
    culprits=("discriminator",),
    where="opt_d.step()",
    faulty=game(in_turn(clear_before=False)),
    fixed=game(in_turn(clear_before=True)),
    quick=True,
)


def detached(*, detach):
    def fit(generator, discriminator, opt_g, opt_d, batches):
        for real in batches:
            made = generator(torch.randn(len(real), 4))
            opt_d.zero_grad()
            seen = made.detach() if detach else made
            d_loss = F.relu(1 - discriminator(real)).mean() + F.relu(1 + discriminator(seen)).mean()
            d_loss.backward(retain_graph=not detach)
            opt_d.step()
            if not detach:
                made = generator(torch.randn(len(real), 4))
            g_loss = -discriminator(made).mean()
            g_loss.backward()
            opt_g.step()
            opt_g.zero_grad()

    return fit


pair(
    "critic_trains_through_the_generator",
    "adversaries_oppose",
    "gradients_mixed",
    culprits=("discriminator",),
    where="opt_g.step()",
    faulty=game(detached(detach=False)),
    fixed=game(detached(detach=True)),
)
