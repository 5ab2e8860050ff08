"""Terms that are cut off from what their backward pass trains: their gradient goes to another network only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.loss.every_term_trains.faults import CHECK
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def upscaler(picture_for_critic):
    """A picture is made larger; a critic looks at it in the same step."""

    def make():
        g = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.PixelShuffle(2)
        )
        d = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, 2, 1))
        of_g, of_d = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=4e-4)

        def fit(batches):
            for small, large in batches:
                of_g.zero_grad()
                picture = g(small)
                judged = d(picture_for_critic(picture))
                adversarial = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
                (F.l1_loss(picture, large) + 0.05 * adversarial).backward()
                of_g.step()

                of_d.zero_grad()
                real, fake = d(large), d(picture.detach())
                (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
                of_d.step()

        large = F.interpolate(torch.rand(6, 3, 6, 6), size=16, mode="bilinear")
        batch = F.avg_pool2d(large, 2), large
        return TrainLoop(model={"g": g, "d": d}, optimizer=[of_g, of_d], batch=batch, fit=fit)

    return make


pair(
    "adversarial_term_of_a_detached_picture",
    CHECK,
    "term_detached",
    culprits=("binary_cross_entropy_with_logits", "g", "d"),
    where="lambda picture: picture.detach()",
    mentions=("without detach()",),
    faulty=upscaler(lambda picture: picture.detach()),
    fixed=upscaler(lambda picture: picture),
)


def actor_near_the_data(grad_through_action):
    """TD3+BC: the actor follows the critic and stays near the recorded actions."""

    def make():
        actor, critic = mlp(5, 24, 2), mlp(7, 24, 1)
        of_actor, of_critic = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)

        def fit(batches):
            for state, action, value in batches:
                of_critic.zero_grad()
                F.mse_loss(critic(torch.cat([state, action], 1)).squeeze(1), value).backward()
                of_critic.step()

                with torch.set_grad_enabled(grad_through_action):
                    chosen = torch.tanh(actor(state))
                q = critic(torch.cat([state, chosen], 1))
                value_term = -q.mean()
                loss = value_term + 2.5 * F.mse_loss(torch.tanh(actor(state)), action)
                of_actor.zero_grad()
                loss.backward()
                of_actor.step()

        state, action = torch.randn(24, 5), torch.randn(24, 2).tanh()
        batch = state, action, (state[:, 0] - action.square().sum(1))
        return TrainLoop(
            model={"actor": actor, "critic": critic}, optimizer=[of_actor, of_critic], batch=batch, fit=fit
        )

    return make


pair(
    "value_of_an_action_without_a_graph",
    CHECK,
    "term_detached",
    culprits=("value_term",),
    where="value_term = -q.mean()",
    mentions=("the gradient that it gives to critic", "no_grad()"),
    faulty=actor_near_the_data(False),
    fixed=actor_near_the_data(True),
)
