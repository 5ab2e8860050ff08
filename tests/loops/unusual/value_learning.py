"""Reinforcement learning on values and preferences: target networks, gradients and parameters that nobody takes."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh


def transitions(rows=8, width=6, actions=4):
    state = torch.randn(rows, width)
    action = torch.randint(actions, (rows,))
    reward = (action == state[:, :actions].argmax(1)).to(state.dtype)
    return {
        "state": state,
        "action": action,
        "reward": reward,
        "next": state.roll(1, 1),
        "done": torch.rand(rows) < 0.2,
    }


class DuelingNet(nn.Module):
    def __init__(self, width=6, hidden=16, actions=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, hidden), nn.ReLU())
        self.value = nn.Linear(hidden, 1)
        self.advantage = nn.Linear(hidden, actions)

    def forward(self, state):
        h = self.trunk(state)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)


@torch.no_grad()
def polyak(target, online, tau):
    for kept, live in zip(target.parameters(), online.parameters(), strict=True):
        kept.lerp_(live, tau)


def train_double_dqn(online, target, optimizer, batches, gamma=0.5):
    for b in batches:
        value = online(b["state"]).gather(1, b["action"][:, None]).squeeze(1)
        with torch.no_grad():
            best = online(b["next"]).argmax(1, keepdim=True)
            aim = b["reward"] + gamma * target(b["next"]).gather(1, best).squeeze(1) * ~b["done"]
        optimizer.zero_grad()
        F.mse_loss(value, aim).backward()
        optimizer.step()
        polyak(target, online, 0.05)


@odd(
    notes="the online net also runs under no_grad in every step; only the chosen action's output has a gradient; "
    "a mean is taken away"
)
def double_dueling_dqn() -> TrainLoop:
    online = DuelingNet()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-3)
    return TrainLoop(
        model=[online, target],
        optimizer=optimizer,
        batch=transitions(),
        fit=lambda batches: train_double_dqn(online, target, optimizer, batches),
    )


class Critic(nn.Module):
    def __init__(self, width=6, actions=2, hidden=16):
        super().__init__()
        self.net = relu_mlp(width + actions, hidden, 1)

    def forward(self, state, action):
        return self.net(torch.cat([state, action], 1)).squeeze(1)


def moves(rows=8, width=6):
    state, action = torch.randn(rows, width), torch.rand(rows, 2) * 2 - 1
    return state, action, -(action - state[:, :2].tanh()).square().sum(1), state.roll(1, 1)


def train_ddpg(actor, critic, old_actor, old_critic, opt_actor, opt_critic, batches, gamma=0.5):
    for state, action, reward, following in batches:
        with torch.no_grad():
            aim = reward + gamma * old_critic(following, old_actor(following).tanh())
        opt_critic.zero_grad()
        F.mse_loss(critic(state, action), aim).backward()
        opt_critic.step()
        opt_actor.zero_grad()
        (-critic(state, actor(state).tanh()).mean()).backward()
        opt_actor.step()
        polyak(old_actor, actor, 0.05)
        polyak(old_critic, critic, 0.05)


@odd(notes="the actor's loss runs through the critic and leaves gradients there that no step takes")
def ddpg() -> TrainLoop:
    actor, critic = relu_mlp(6, 16, 2), Critic()
    old_actor, old_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    opt_actor = torch.optim.Adam(actor.parameters(), lr=2e-3)
    opt_critic = torch.optim.Adam(critic.parameters(), lr=5e-3)
    return TrainLoop(
        model={"actor": actor, "critic": critic, "old_actor": old_actor, "old_critic": old_critic},
        optimizer=[opt_actor, opt_critic],
        batch=moves(),
        batches=fresh(moves),
        fit=lambda batches: train_ddpg(actor, critic, old_actor, old_critic, opt_actor, opt_critic, batches),
    )


def share_gradients(local, shared):
    for mine, theirs in zip(local.parameters(), shared.parameters(), strict=True):
        theirs.grad = mine.grad


def train_a3c_worker(shared, optimizer, batches):
    local = copy.deepcopy(shared)
    for b in batches:
        local.load_state_dict(shared.state_dict())
        local.zero_grad()
        out = local(b["state"])
        choice, value = Categorical(logits=out[:, :4]), out[:, 4]
        action = choice.sample()
        reward = (action == b["state"][:, :4].argmax(1)).to(value.dtype)
        advantage = reward - value
        loss = (
            -choice.log_prob(action) * advantage.detach() + 0.5 * advantage.square() - 0.01 * choice.entropy()
        ).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(local.parameters(), 40.0)
        optimizer.zero_grad()
        share_gradients(local, shared)
        optimizer.step()


@odd(notes="the model that is optimised never runs: a local copy does, and its gradients are handed over (A3C)")
def a3c_gradients_from_local_copy() -> TrainLoop:
    shared = mlp(6, 16, 5, activation=nn.Tanh)
    optimizer = torch.optim.RMSprop(shared.parameters(), lr=5e-3)
    return TrainLoop(
        model=shared,
        optimizer=optimizer,
        batch=transitions(),
        fit=lambda batches: train_a3c_worker(shared, optimizer, batches),
    )


class Scorer(nn.Module):
    """Token sequences to log-probabilities (as a policy) or to one score (as a reward model)."""

    def __init__(self, vocabulary=10, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.Sequential(nn.Linear(width, 16), nn.ReLU())
        self.out = nn.Linear(16, vocabulary)

    def forward(self, ids):
        logits = self.out(self.body(self.embed(ids[:, :-1])))
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))


def preferences(rows=6):
    chosen = torch.randint(10, (rows, 1)) + torch.arange(5)
    return chosen % 10, torch.randint(10, (rows, 5))


def train_dpo(policy, reference, optimizer, batches, beta=0.5):
    for chosen, rejected in batches:
        both = torch.cat([chosen, rejected])
        new = policy(both).chunk(2)
        with torch.no_grad():
            old = reference(both).chunk(2)
        loss = -F.logsigmoid(beta * ((new[0] - old[0]) - (new[1] - old[1]))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(notes="the loss is exactly ln 2 at the start for every batch, since the policy equals its frozen reference (DPO)")
def dpo_preferences() -> TrainLoop:
    policy = Scorer()
    reference = copy.deepcopy(policy).eval()
    for parameter in reference.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)
    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batch=preferences(),
        batches=fresh(preferences),
        fit=lambda batches: train_dpo(policy, reference, optimizer, batches),
    )
