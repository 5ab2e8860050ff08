"""PPO: a rollout of a small environment, two passes over it in two minibatches, a rate that falls to nothing."""

import torch
from torch import nn
from torch.distributions import Normal

from pytest_trainloop import TrainLoop

ROLLOUT, PASSES, MINIBATCHES, UPDATES = 16, 2, 2, 50


class ActorCritic(nn.Module):
    def __init__(self, observations=3, actions=1, width=32):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, actions))
        self.critic = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, 1))
        self.log_std = nn.Parameter(torch.zeros(actions))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, 1.4)
                nn.init.zeros_(module.bias)

    def forward(self, x):
        return Normal(self.actor(x), self.log_std.exp()), self.critic(x).squeeze(-1)


def advantages_of(rewards, values, discount=0.99, smoothing=0.95):
    """Generalized advantage estimation."""
    advantages, last = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else values[t]
        last = rewards[t] + discount * following - values[t] + discount * smoothing * last
        advantages[t] = last
    return advantages


@torch.no_grad()
def rollout(model, state):
    """A point that is to be pushed to the origin."""
    seen = []
    for _ in range(ROLLOUT):
        policy, value = model(state)
        action = policy.sample()
        seen.append((state, action, policy.log_prob(action).sum(-1), -state.square().mean(-1), value))
        state = (0.95 * state + 0.2 * action).clamp(-3, 3)
    states, actions, log_probs, rewards, values = (torch.stack(column) for column in zip(*seen, strict=True))
    advantages = advantages_of(rewards, values)
    return [column.flatten(0, 1) for column in (states, actions, log_probs, advantages, advantages + values)]


class PPO:
    def __init__(self, lr=1e-3):
        self.model = ActorCritic()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr, eps=1e-5)
        self.lr, self.updates = lr, 0

    def loss(self, states, actions, old, advantages, returns):
        policy, values = self.model(states)
        ratio = (policy.log_prob(actions).sum(-1) - old).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return -surrogate + 0.5 * (values - returns).square().mean() - 0.01 * policy.entropy().mean()

    def fit(self, batches):
        for start in batches:
            self.optimizer.param_groups[0]["lr"] = self.lr * (1 - self.updates / UPDATES)
            self.updates += 1
            data = rollout(self.model, start)
            for _ in range(PASSES):
                for rows in torch.randperm(len(data[0])).chunk(MINIBATCHES):
                    loss = self.loss(*(column[rows] for column in data))
                    self.optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()


def make():
    ppo = PPO()
    return TrainLoop(
        model=ppo.model,
        optimizer=ppo.optimizer,
        batch=torch.randn(8, 3),
        batches=lambda n: [torch.randn(8, 3) for _ in range(n)],
        fit=ppo.fit,
        rows_interact=True,
    )
