"""Two losses and two optimizers: the step of one uses what the other's loss has left in ``.grad``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def painter(zeroed_first):
    """A picture is redrawn; the discriminator returns its loss."""

    def make():
        net = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.SiLU(), nn.Conv2d(12, 3, 3, padding=1))
        disc = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, 1, 1))
        of_net, of_disc = torch.optim.AdamW(net.parameters(), lr=5e-4), torch.optim.AdamW(disc.parameters(), lr=5e-4)

        def judged(picture, real):
            scores = disc(picture)
            return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))

        def fit(batches):
            for before, after in batches:
                drawn = torch.tanh(net(before))
                of_net.zero_grad()
                (F.mse_loss(drawn, after) + 0.5 * judged(drawn, True)).backward()
                of_net.step()
                if zeroed_first:
                    of_disc.zero_grad()
                told_apart = judged(after, True) + judged(drawn.detach(), False)
                told_apart.backward()
                of_disc.step()
                of_disc.zero_grad()

        before = torch.rand(4, 3, 12, 12) * 2 - 1
        return TrainLoop(
            model={"net": net, "disc": disc}, optimizer=[of_net, of_disc], batch=(before, before.flip(1)), fit=fit
        )

    return make


pair(
    "discriminator_steps_with_the_generators_loss",
    "step_order",
    "another_loss_kept",
    level="advice",
    culprits=("disc.0.weight",),
    where="told_apart.backward()",
    faulty=painter(False),
    fixed=painter(True),
)


def pilot(zeroed_first):
    """The actor follows the critic, whose own loss comes after it."""

    def make():
        actor, critic = mlp(5, 24, 2), mlp(7, 24, 1)
        of_actor, of_critic = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)

        def value(state, action):
            return critic(torch.cat([state, action], 1)).squeeze(1)

        def fit(batches):
            for state, action, reward in batches:
                of_actor.zero_grad()
                (-value(state, torch.tanh(actor(state))).mean()).backward()
                of_actor.step()
                if zeroed_first:
                    of_critic.zero_grad()
                F.mse_loss(value(state, action), reward).backward()
                of_critic.step()
                of_critic.zero_grad()

        state, action = torch.randn(24, 5), torch.randn(24, 2).tanh()
        batch = state, action, state[:, 0] - action.square().sum(1)
        return TrainLoop(
            model={"actor": actor, "critic": critic}, optimizer=[of_actor, of_critic], batch=batch, fit=fit
        )

    return make


pair(
    "critic_steps_with_the_actors_loss",
    "step_order",
    "another_loss_kept",
    level="advice",
    culprits=("critic.0.weight",),
    where="F.mse_loss(value(state, action), reward).backward()",
    faulty=pilot(False),
    fixed=pilot(True),
)
