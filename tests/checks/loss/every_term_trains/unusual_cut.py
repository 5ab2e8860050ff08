"""Correct loops with a detached side in a term that is backpropagated beside others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def upscaling(*, every, both):
    g, d = mlp(6, 24, 8), mlp(8, 24, 1)
    of_g, of_d = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=4e-4)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            made = g(x)
            if both:
                d.requires_grad_(False)
                of_g.zero_grad()
                (F.mse_loss(made, y) + 0.1 * F.softplus(-d(made)).mean()).backward()
                of_g.step()
                d.requires_grad_(True)
                of_d.zero_grad()
                (F.softplus(d(made.detach())).mean() + F.softplus(-d(y)).mean()).backward()
                of_d.step()
                continue
            of_g.zero_grad()
            critic = F.softplus(d(made.detach())).mean() + F.softplus(-d(y)).mean()
            (F.mse_loss(made, y) + critic).backward()
            of_g.step()
            if number % every == every - 1:  # the critic gathers the gradients of some batches
                of_d.step()
                of_d.zero_grad()

    x = torch.randn(16, 6)
    batch = x, torch.cat([x, x[:, :2] * x[:, 2:4]], 1)
    return TrainLoop(model={"g": g, "d": d}, optimizer=[of_g, of_d], batch=batch, fit=fit)


@odd(notes="one backward pass for both nets: the critic's term has a detached side, and its own optimizer uses it")
def critic_in_the_pass_of_its_generator() -> TrainLoop:
    return upscaling(every=1, both=False)


@odd(notes="the same in two passes, with the critic frozen in the generator's")
def critic_frozen_in_the_pass_of_its_generator() -> TrainLoop:
    return upscaling(every=1, both=True)


@odd(notes="a head predicts the error of the other one, which is its target; an optimizer of its own")
def error_is_predicted_by_a_second_head() -> TrainLoop:
    body, head, doubt = mlp(8, 24, 24), nn.Linear(24, 4), nn.Linear(24, 1)
    of_net = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-2)
    of_doubt = torch.optim.SGD(doubt.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            features = body(x)
            losses = F.cross_entropy(head(features), y, reduction="none")
            expected = F.softplus(doubt(features.detach())).squeeze(1)
            of_net.zero_grad()
            of_doubt.zero_grad()
            (losses.mean() + F.mse_loss(expected, losses.detach())).backward()
            of_net.step()
            of_doubt.step()

    models = {"body": body, "head": head, "doubt": doubt}
    return TrainLoop(model=models, optimizer=[of_net, of_doubt], batch=points(), batches=fresh(points), fit=fit)


@odd(notes="a table of centres has a term in the loss and is moved by hand, as in center loss with its own rate")
def centres_moved_by_their_own_gradient() -> TrainLoop:
    body, head = mlp(8, 24, 6), nn.Linear(6, 4)
    centres = nn.Embedding(4, 6)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-2)

    def fit(batches):
        for x, y in batches:
            features = body(x)
            near = (features.detach() - centres(y)).square().sum(1).mean()
            optimizer.zero_grad()
            centres.zero_grad()
            (F.cross_entropy(head(features), y) + 0.5 * near).backward()
            optimizer.step()
            with torch.no_grad():
                centres.weight -= 0.1 * centres.weight.grad

    models = {"body": body, "head": head, "centres": centres}
    return TrainLoop(model=models, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)
