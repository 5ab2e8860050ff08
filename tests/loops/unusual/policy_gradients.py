"""Reinforcement learning on policies: negative losses, gradients of samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh


def states(rows=8, width=6):
    return torch.randn(rows, width)


def pull(state, action):
    """Reward of a contextual bandit: 1 where the arm is the largest of the first four features."""
    return (action == state[:, :4].argmax(1)).to(state.dtype)


def train_reinforce(policy, optimizer, batches):
    baseline = 0.0
    for state in batches:
        choice = Categorical(logits=policy(state))
        action = choice.sample()
        reward = pull(state, action)
        loss = -(choice.log_prob(action) * (reward - baseline)).mean()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(notes="the loss is negative or positive, does not fall, and is 0 where no arm paid")
def reinforce_bandit() -> TrainLoop:
    policy = mlp(6, 16, 4, activation=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batch=states(),
        batches=fresh(states),
        fit=lambda batches: train_reinforce(policy, optimizer, batches),
    )


class EpisodicPolicy(nn.Module):
    """As in PyTorch's own REINFORCE example: the model remembers what the episode produced."""

    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.affine2 = nn.Linear(16, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return F.softmax(self.affine2(torch.tanh(self.affine1(x))), dim=1)


def select_action(policy, state):
    choice = Categorical(policy(state))
    action = choice.sample()
    policy.saved_log_probs.append(choice.log_prob(action))
    return action


def finish_episode(policy, optimizer, gamma=0.9):
    following, returns = torch.zeros_like(policy.rewards[-1]), []
    for reward in reversed(policy.rewards):
        following = reward + gamma * following
        returns.insert(0, following)
    returns = torch.stack(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_loss = [-log_prob * value for log_prob, value in zip(policy.saved_log_probs, returns, strict=True)]
    optimizer.zero_grad()
    torch.cat(policy_loss).sum().backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


def train_episodes(policy, optimizer, batches, horizon=3):
    for state in batches:
        for _ in range(horizon):
            action = select_action(policy, state)
            push = 2.0 * action.to(state.dtype) - 1.0
            state = state.roll(1, 1) + 0.3 * push[:, None]
            policy.rewards.append(-state.abs().mean(1))
        finish_episode(policy, optimizer)


@odd(
    notes="graphs are kept on the module over a whole episode and backpropagated from another function, summed "
    "not averaged"
)
def reinforce_episodes_saved_on_model() -> TrainLoop:
    policy = EpisodicPolicy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batch=torch.randn(4, 4),
        fit=lambda batches: train_episodes(policy, optimizer, batches),
    )


def train_by_ascent(policy, optimizer, batches, entropy=0.01):
    for state in batches:
        choice = Categorical(logits=policy(state))
        value = (choice.probs * F.one_hot(state[:, :4].argmax(1), 4)).sum(1)
        objective = value.mean() + entropy * choice.entropy().mean()
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()


@odd(notes="an objective that rises: the optimizer has maximize=True")
def expected_reward_maximized() -> TrainLoop:
    policy = mlp(6, 16, 4, activation=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, maximize=True)
    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batch=states(),
        batches=fresh(states),
        fit=lambda batches: train_by_ascent(policy, optimizer, batches),
    )


class SharedActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.actor = nn.Linear(16, 4)
        self.critic = nn.Linear(16, 1)


def train_actor_critic(net, opt_actor, opt_critic, batches):
    for state in batches:
        features = net.encoder(state)
        value = net.critic(features).squeeze(1)
        choice = Categorical(logits=net.actor(features.detach()))
        action = choice.sample()
        reward = pull(state, action)
        advantage = reward - value
        opt_critic.zero_grad()
        F.smooth_l1_loss(value, reward).backward()
        opt_critic.step()
        opt_actor.zero_grad()
        (-(choice.log_prob(action) * advantage.detach()).mean() - 0.01 * choice.entropy().mean()).backward()
        opt_actor.step()


@odd(
    notes="the actor sees detached features: only the critic's loss trains the shared encoder, on purpose; "
    "the net has no forward"
)
def actor_critic_detached_encoder() -> TrainLoop:
    net = SharedActorCritic()
    opt_critic = torch.optim.Adam([*net.encoder.parameters(), *net.critic.parameters()], lr=5e-3)
    opt_actor = torch.optim.Adam(net.actor.parameters(), lr=5e-3)
    return TrainLoop(
        model=net,
        optimizer=[opt_actor, opt_critic],
        batch=states(),
        batches=fresh(states),
        fit=lambda batches: train_actor_critic(net, opt_actor, opt_critic, batches),
    )


class BigramPolicy(nn.Module):
    def __init__(self, vocabulary=8, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = relu_mlp(width, 16, vocabulary)

    def forward(self, ids):
        return self.body(self.embed(ids))


def log_probs(policy, ids):
    return policy(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def complete(policy, prompt, length=3):
    ids = prompt
    for _ in range(length):
        ids = torch.cat([ids, Categorical(logits=policy(ids[:, -1])).sample()[:, None]], 1)
    return ids


def train_grpo(policy, reference, optimizer, batches, group=4, beta=0.04):
    for prompts in batches:
        ids = complete(policy, prompts.repeat_interleave(group, 0))
        reward = (ids[:, 1:] % 2 == 0).sum(1).to(torch.get_default_dtype()).view(-1, group)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        new = log_probs(policy, ids)
        with torch.no_grad():
            old = log_probs(reference, ids)
        kl = (old - new).exp() - (old - new) - 1
        loss = -((new - new.detach()).exp() * advantage - beta * kl).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(notes="the loss is about 0 in value from first to last: only its gradient means something (GRPO)")
def grpo() -> TrainLoop:
    policy, reference = BigramPolicy(), BigramPolicy()
    reference.load_state_dict(policy.state_dict())
    reference.requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    return TrainLoop(
        model={"policy": policy, "reference": reference},
        optimizer=optimizer,
        batch=torch.randint(8, (4, 1)),
        batches=fresh(lambda: torch.randint(8, (4, 1))),
        fit=lambda batches: train_grpo(policy, reference, optimizer, batches),
    )
