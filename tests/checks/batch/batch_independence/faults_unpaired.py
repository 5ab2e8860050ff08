"""What has one entry for each row and lost its rows before it met them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Weights that are averaged before they meet the losses of rows.


def reweighted(reduction):
    def make():
        weight = 0.2 + drawn(16, seed=5).abs()

        def loss_of(model, batch):
            losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction)
            return (losses * batch["sample_weight"]).mean()

        x, y = data.labelled()
        return loop(mlp(6, 24, 3), {"x": x, "y": y, "sample_weight": weight}, loss_of)

    return make


def prioritized(averaged):
    """Transitions and their importance-sampling weights, as a replay buffer gives them."""

    def make():
        def loss_of(model, batch):
            (states, actions, targets), weights = batch
            error = targets - model(states).gather(1, actions)
            return (error.square() * weights.mean()).mean() if averaged else (error.square() * weights).mean()

        actions = torch.randint(3, (12, 1), generator=torch.Generator().manual_seed(1))
        transitions = (drawn(12, 4), actions, drawn(12, 1, seed=2))
        return loop(mlp(4, 24, 3), (transitions, 0.1 + drawn(12, 1, seed=3).abs()), loss_of)

    return make


pair(
    "sample_weights_of_a_mean",
    "batch_independence",
    "weights_averaged",
    where='return (losses * batch["sample_weight"]).mean()',
    faulty=reweighted("mean"),
    fixed=reweighted("none"),
    quick=True,
)
pair(
    "mean_of_importance_weights",
    "batch_independence",
    "weights_averaged",
    where="(error.square() * weights.mean()).mean()",
    faulty=prioritized(True),
    fixed=prioritized(False),
)


# A column beside a row: sums over all pairs.


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = mlp(4, 16, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, states):
        hidden = self.body(states)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden)


def actor_critic(squeezed):
    def make():
        def loss_of(model, batch):
            states, actions, returns = batch
            scores, values = model(states)
            values = values.squeeze(-1) if squeezed else values
            chosen = scores.gather(1, actions[:, None])[:, 0]
            advantage = (returns - values).detach()
            return F.mse_loss(values.reshape(-1), returns) - (chosen * advantage).mean()

        return loop(ActorCritic(), data.episode(), loss_of)

    return make


def bellman(keepdim):
    def make():
        target = mlp(4, 24, 3).requires_grad_(False)

        def loss_of(model, batch):
            q = model(batch["obs"]).gather(1, batch["action"])
            with torch.no_grad():
                following = target(batch["next_obs"]).amax(1, keepdim=keepdim)
                backup = batch["reward"] + 0.9 * (1 - batch["done"]) * following
            return F.smooth_l1_loss(q, backup)

        done = (torch.arange(12)[:, None] % 5 == 4).to(torch.get_default_dtype())
        action = torch.randint(3, (12, 1), generator=torch.Generator().manual_seed(1))
        batch = {"obs": drawn(12, 4), "action": action, "reward": drawn(12, 1, seed=2), "done": done}
        return loop(mlp(4, 24, 3), {**batch, "next_obs": drawn(12, 4, seed=3)}, loss_of)

    return make


pair(
    "advantages_of_all_pairs",
    "batch_independence",
    "all_pairs_of_rows",
    where="advantage = (returns - values).detach()",
    faulty=actor_critic(squeezed=False),
    fixed=actor_critic(squeezed=True),
    quick=True,
)
pair(
    "next_values_of_all_rows",
    "batch_independence",
    "all_pairs_of_rows",
    where='backup = batch["reward"] + 0.9 * (1 - batch["done"]) * following',
    faulty=bellman(keepdim=False),
    fixed=bellman(keepdim=True),
)
