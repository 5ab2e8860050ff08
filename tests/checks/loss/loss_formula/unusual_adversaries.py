"""Right losses of two networks that play against each other, with penalties of gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd


def game(of_critic, of_maker, *, critic=None, real=None):
    """One step of the critic and one of the maker for each batch."""
    real = torch.randn(8, 3) + 1 if real is None else real
    critic = mlp(3, 16, 1) if critic is None else critic
    maker = mlp(2, 16, 3) if real.dim() == 2 else nn.Sequential(mlp(2, 16, 48), nn.Unflatten(1, (3, 4, 4)))
    steps = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (critic, maker)]

    def fit(batches):
        for x in batches:
            made = maker(torch.randn(len(x), 2, dtype=x.dtype))
            steps[0].zero_grad()
            of_critic(critic, x, made.detach()).backward()
            steps[0].step()
            steps[1].zero_grad()
            of_maker(critic, x, made).backward()
            steps[1].step()

    return TrainLoop(model={"critic": critic, "maker": maker}, optimizer=steps, batch=real, fit=fit)


def slope_between(critic, real, made):
    mix = torch.rand(len(real), *[1] * (real.dim() - 1), dtype=real.dtype)
    between = (mix * real + (1 - mix) * made).requires_grad_()
    return torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]


def of_pictures():
    critic = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(16, 1))
    return {"critic": critic, "real": torch.randn(4, 3, 4, 4)}


@odd(notes="only slopes above 1 are penalised")
def one_sided_penalty():
    def of_critic(critic, real, made):
        norm = slope_between(critic, real, made).flatten(1).norm(dim=1)
        return critic(made).mean() - critic(real).mean() + 10 * F.relu(norm - 1).square().mean()

    return game(of_critic, lambda critic, _, made: -critic(made).mean(), **of_pictures())


@odd(notes="the slope at data is to be 0, not 1 (R1 regularisation)")
def slope_at_data_is_lowered():
    def of_critic(critic, real, made):
        real = real.clone().requires_grad_()
        scores = critic(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        penalty = slope.square().sum((1, 2, 3)).mean()
        return F.softplus(critic(made)).mean() + F.softplus(-scores).mean() + 5 * penalty

    return game(of_critic, lambda critic, _, made: F.softplus(-critic(made)).mean(), **of_pictures())


@odd(notes="labels of -1 and 1 multiply scores in one hinge for both halves of a batch")
def one_hinge_for_both_halves():
    def of_critic(critic, real, made):
        scores = critic(torch.cat([real, made])).squeeze(1)
        sign = torch.cat([torch.ones(len(real)), -torch.ones(len(made))]).to(scores.dtype)
        return F.relu(1 - sign * scores).mean()

    return game(of_critic, lambda critic, _, made: -critic(made).mean())


@odd(notes="the maker raises the logarithm of being taken for data, and that alone")
def logarithm_of_being_taken_for_data():
    def of_critic(critic, real, made):
        p, q = critic(real).sigmoid(), critic(made).sigmoid()
        return -(torch.log(p + 1e-7).mean() + torch.log(1 - q + 1e-7).mean())

    return game(of_critic, lambda critic, _, made: -torch.log(critic(made).sigmoid() + 1e-7).mean())
