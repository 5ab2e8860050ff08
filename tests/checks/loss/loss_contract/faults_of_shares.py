"""Classes that are ignored between others, means over what a mask leaves out, predictions that are repeated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def loop(model, batch, loss_of):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(model, item).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


# Codes of a picture, one after the other: 0 is a code as any other.


class Painter(nn.Module):
    def __init__(self, codes=6, width=24):
        super().__init__()
        self.embed, self.begin = nn.Embedding(codes, width), nn.Parameter(torch.zeros(width))
        self.decoder, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, codes)

    def forward(self, codes):
        given = torch.cat([self.begin.expand(len(codes), 1, -1), self.embed(codes)[:, :-1]], 1)
        return self.head(self.decoder(given)[0])


def painting(ignored):
    def make():
        codes = torch.randint(6, (6, 1), generator=generator()) + torch.arange(10)
        return loop(
            Painter(),
            codes % 6,
            lambda model, codes: F.cross_entropy(model(codes).transpose(1, 2), codes, ignore_index=ignored),
        )

    return make


pair(
    "first_code_of_a_picture_is_ignored",
    "loss_contract",
    "real_class_ignored",
    level="advice",
    culprits=("ignore_index=0",),
    faulty=painting(0),
    fixed=painting(-100),
)


# Chunks of actions, padded at the end of an episode.


def chunks(mean):
    def make():
        state, left = torch.randn(8, 6, generator=generator()), torch.tensor([10, 6, 8, 10, 3, 7, 9, 5])
        is_pad = torch.arange(10) >= left[:, None]
        action = (state[:, :1] + 0.1 * torch.arange(10))[..., None].expand(-1, -1, 2).clone()

        def loss_of(model, batch):
            each = F.l1_loss(model(batch["state"]).view(-1, 10, 2), batch["action"], reduction="none")
            return mean(each, ~batch["action_is_pad"].unsqueeze(-1))

        return loop(mlp(6, 32, 20), {"state": state, "action": action, "action_is_pad": is_pad}, loss_of)

    return make


pair(
    "mean_of_actions_that_are_padded",
    "loss_contract",
    "padding_counted",
    level="advice",
    faulty=chunks(lambda each, keep: (each * keep).mean()),
    fixed=chunks(lambda each, keep: (each * keep).sum() / (keep.sum() * each.shape[-1])),
)


# A soft value: one log-probability for each action, where their sum is needed.


class Soft(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.value = mlp(5, 24, 6), mlp(8, 24, 1)

    def act(self, obs):
        mean, spread = self.policy(obs).chunk(2, -1)
        made = Normal(mean, spread.clamp(-3, 1).exp())
        action = made.rsample()
        return action, made.log_prob(action)


def soft_values(over_actions):
    def make():
        batch = {"obs": torch.randn(16, 5, generator=generator()), "reward": torch.randn(16, 1, generator=generator(1))}
        batch["action"] = torch.randn(16, 3, generator=generator(2))

        def loss_of(model, batch):
            action, log_prob = model.act(batch["obs"])
            value = model.value(torch.cat([batch["obs"], action], -1))
            target = (batch["reward"] + 0.9 * (value - 0.2 * over_actions(log_prob))).detach()
            found = model.value(torch.cat([batch["obs"], batch["action"]], -1))
            return F.mse_loss(found, target) + (0.2 * over_actions(log_prob) - value).mean()

        return loop(Soft(), batch, loss_of)

    return make


pair(
    "log_prob_of_each_action_in_the_target",
    "loss_contract",
    "broadcast",
    level="advice",
    faulty=soft_values(lambda log_prob: log_prob),
    fixed=soft_values(lambda log_prob: log_prob.sum(-1, keepdim=True)),
)
