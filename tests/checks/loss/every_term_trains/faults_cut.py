"""Terms that are cut off from what their backward pass trains: their gradient goes to another network only."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.checks.loss.every_term_trains.faults import CHECK
from tests.loops.nets import mlp
from tests.loops.pairs import pair


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
    faulty=actor_near_the_data(False),
    fixed=actor_near_the_data(True),
)
