"""Rollouts that a loop plays itself, with returns that run on into the next episode; and such that end rightly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.pairs import pair


class Balance:
    """Sticks that fall when they lean too far, and start again by themselves."""

    def __init__(self, sticks=3, first_end=0):
        self.draw, self.sticks, self.wait = torch.Generator().manual_seed(0), sticks, first_end
        self.state = self.start()

    def start(self):
        return (torch.rand(self.sticks, 2, generator=self.draw) - 0.5) * 0.4

    def step(self, action):
        lean, speed = self.state.unbind(1)
        speed = speed + 0.3 * lean + 0.1 * (action.float() * 2 - 1)
        done = ((lean + 0.5 * speed).abs() > 0.6) & (self.wait <= 0)
        self.wait -= 1
        moved = torch.stack([lean + 0.5 * speed, speed], 1).clamp(-1, 1)
        self.state = torch.where(done[:, None], self.start(), moved)
        return self.state.clone(), 0.1 - done.float() + 0.05 * lean, done


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(2, 16, 2), mlp(2, 16, 1)

    def value(self, observation):
        return self.critic(observation).squeeze(-1)


def played(returns_of, first_end=0, steps=12):
    """``returns_of(rewards, dones, values, last)``: (steps, sticks) each, ``dones`` after each step, and the value
    after the last; the advantages of all steps."""

    def make():
        agent, environment = Agent(), Balance(first_end=first_end)
        optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3)

        @torch.no_grad()
        def rollout():
            rows, observation = [], environment.state.clone()
            for _ in range(steps):
                action = torch.distributions.Categorical(logits=agent.actor(observation)).sample()
                after, reward, done = environment.step(action)
                rows.append((observation, action, agent.value(observation), reward, done.float()))
                observation = after
            observations, actions, values, rewards, dones = (torch.stack(column) for column in zip(*rows, strict=True))
            advantages = returns_of(rewards, dones, values, agent.value(observation))
            return observations.flatten(0, 1), actions.flatten(), advantages.flatten(), (advantages + values).flatten()

        def fit(batches):
            for _ in batches:
                observations, actions, advantages, returns = rollout()
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                log_prob = torch.distributions.Categorical(logits=agent.actor(observations)).log_prob(actions)
                loss = F.mse_loss(agent.value(observations), returns) - (log_prob * advantages).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=agent, optimizer=optimizer, batch=torch.zeros(1), fit=fit)

    return make


def gae(flag_of):
    """``flag_of(dones, t)``: whether the episode ends after step t."""

    def advantages(rewards, dones, values, last):
        found, running, after = torch.zeros_like(rewards), torch.zeros_like(last), last
        for t in reversed(range(len(rewards))):
            going_on = 1 - flag_of(dones, t)
            running = rewards[t] + 0.97 * after * going_on - values[t] + 0.92 * going_on * running
            found[t], after = running, values[t]
        return found

    return advantages


def discounted(cut):
    def advantages(rewards, dones, values, last):
        found, running = [], last
        for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
            running = reward + 0.97 * running * (1 - done if cut else 1)
            found.insert(0, running)
        return torch.stack(found) - values

    return advantages


def after(dones, t):
    return dones[t]


def next_one(dones, t):
    return dones[min(t + 1, len(dones) - 1)]


# https://github.com/RoboVerseOrg/RoboVerse/pull/814: flags of after a step are read as those of before it.

pair(
    "advantages_by_the_flags_of_the_next_step",
    "segment_independence",
    "returns_across_episodes",
    faulty=played(gae(next_one)),
    fixed=played(gae(after)),
    where="(advantages + values)",
)

# https://github.com/nikhilbarhate99/PPO-PyTorch/issues/8: no episode ends in the first rollout.

pair(
    "returns_of_a_played_rollout_are_not_cut",
    "segment_independence",
    "returns_across_episodes",
    faulty=played(discounted(cut=False), first_end=15),
    fixed=played(discounted(cut=True), first_end=15),
)


@odd(notes="flags are kept as CleanRL does, of before each step: an episode ends where the next flag is set")
def flags_of_before_each_step():
    def advantages(rewards, dones, values, last):
        before = torch.cat([torch.zeros_like(dones[:1]), dones])
        return gae(lambda _dones, t: before[t + 1])(rewards, dones, values, last)

    return played(advantages)()


@odd(notes="no episode ever ends, and the returns run on over flags that are never set: advice")
def a_task_that_never_ends():
    return played(discounted(cut=False), first_end=10**6)()


@odd(notes="as many rows are drawn from a replay buffer as steps were played, in an order of their own")
def as_many_rows_as_steps():
    net, environment, memory = mlp(2, 16, 2), Balance(sticks=1), []
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def fit(batches):
        for _ in batches:
            for _ in range(12):
                observation = environment.state[0]
                after, reward, done = environment.step(net(observation).argmax()[None])
                memory.append((observation, after[0], reward[0], done[0].float()))
            rows = [memory[int(i)] for i in torch.randint(len(memory), (12,))]
            observations, afters, rewards, dones = (torch.stack(column) for column in zip(*rows, strict=True))
            with torch.no_grad():
                target = rewards + 0.95 * (1 - dones) * net(afters).amax(1)
            optimizer.zero_grad()
            F.smooth_l1_loss(net(observations).amax(1), target).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.zeros(1), fit=fit)


@odd(notes="each update is over one whole episode, whose number of steps follows from what happens in it")
def one_episode_for_each_update():
    net, environment = mlp(2, 16, 2), Balance(sticks=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def fit(batches):
        for _ in batches:
            scores, rewards, done = [], [], False
            while not done and len(rewards) < 30:
                chance = torch.distributions.Categorical(logits=net(environment.state))
                action = chance.sample()
                scores.append(chance.log_prob(action))
                _, reward, done = environment.step(action)
                rewards.append(float(reward))
            returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
            optimizer.zero_grad()
            (-torch.cat(scores) * (returns - returns.mean())).sum().backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.zeros(1), fit=fit)
