"""PPO as CleanRL writes it: one rollout of a small environment, several epochs of minibatches over it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical

from pytest_trainloop import TrainLoop

ENVS, STEPS, OBSERVED, ACTIONS = 4, 16, 6, 3


def layer(inputs, outputs, std=2**0.5):
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, std)
    nn.init.zeros_(made.bias)
    return made


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer(OBSERVED, 32), nn.Tanh(), layer(32, 32), nn.Tanh(), layer(32, 1, 1.0))
        self.actor = nn.Sequential(layer(OBSERVED, 32), nn.Tanh(), layer(32, 32), nn.Tanh(), layer(32, ACTIONS, 0.01))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Environments:
    """Vectorised: the right action is the largest of three observations; episodes end at random."""

    def __init__(self):
        self.state = torch.randn(ENVS, OBSERVED)

    def step(self, action):
        reward = (self.state[:, :ACTIONS].argmax(1) == action).float()
        done = (torch.rand(ENVS) < 0.1).float()
        self.state = torch.randn(ENVS, OBSERVED)
        return self.state, reward, done


def rollout(agent, envs, gamma=0.99, gae_lambda=0.95):
    obs, logprobs, actions, rewards, dones, values = [], [], [], [], [], []
    next_obs, next_done = envs.state, torch.zeros(ENVS)
    for _ in range(STEPS):
        obs.append(next_obs)
        dones.append(next_done)
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        values.append(value.flatten())
        actions.append(action)
        logprobs.append(logprob)
        next_obs, reward, next_done = envs.step(action)
        rewards.append(reward)
    with torch.no_grad():
        next_value = agent.get_value(next_obs).flatten()
        advantages, last = [], torch.zeros(ENVS)
        for t in reversed(range(STEPS)):
            alive = 1.0 - (next_done if t == STEPS - 1 else dones[t + 1])
            after = next_value if t == STEPS - 1 else values[t + 1]
            delta = rewards[t] + gamma * after * alive - values[t]
            last = delta + gamma * gae_lambda * alive * last
            advantages.insert(0, last)
    kept = {"obs": obs, "logprobs": logprobs, "actions": actions, "advantages": advantages, "values": values}
    flat = {name: torch.stack(steps).flatten(0, 1) for name, steps in kept.items()}
    return {**flat, "returns": flat["advantages"] + flat["values"]}


def update(agent, optimizer, b, clip_coef=0.2, ent_coef=0.01, vf_coef=0.5, epochs=2, minibatch_size=32):
    for _ in range(epochs):
        for mb in torch.randperm(len(b["obs"])).split(minibatch_size):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b["obs"][mb], b["actions"][mb])
            ratio = (newlogprob - b["logprobs"][mb]).exp()
            advantages = b["advantages"][mb]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            pg_loss1 = -advantages * ratio
            pg_loss2 = -advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()
            newvalue = newvalue.view(-1)
            unclipped = (newvalue - b["returns"][mb]) ** 2
            clipped = b["values"][mb] + torch.clamp(newvalue - b["values"][mb], -clip_coef, clip_coef)
            v_loss = 0.5 * torch.max(unclipped, (clipped - b["returns"][mb]) ** 2).mean()
            loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def make():
    agent = Agent()
    envs = Environments()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

    def fit(batches):
        for batch in batches:
            update(agent, optimizer, batch)

    return TrainLoop(
        model=agent, optimizer=optimizer, batches=lambda n: [rollout(agent, envs) for _ in range(n)], fit=fit
    )
