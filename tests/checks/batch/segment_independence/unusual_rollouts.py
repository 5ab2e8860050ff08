"""Episodes behind each other in a rollout, each with its own returns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.odd import odd
from tests.loops.plain import loop
from tests.loops.segmented import ActorCritic, Policy, action_logp, advantages_of, rollout

GAMMA = 0.97


def clipped(logp, old, advantages):
    ratio = (logp - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def ppo(model, batch, keep_value, keep_sum, *, bonus=None, normalise=lambda a: (a - a.mean()) / (a.std() + 1e-8)):
    logits, values = model(batch["obs"])
    with torch.no_grad():
        _, last = model(batch["last_obs"])
        rewards = batch["rewards"] if bonus is None else batch["rewards"] + bonus
        advantages = advantages_of(rewards, values, last, keep_value, keep_sum)
        returns = advantages + values
    policy = clipped(action_logp(logits, batch["actions"]), batch["logp"], normalise(advantages))
    return policy + 0.5 * F.mse_loss(values, returns)


@odd(notes="advantages are normalised over all episodes; each is its own otherwise")
def ppo_with_normalised_advantages():
    def loss_of(model, batch):
        running = 1.0 - batch["dones"]
        return ppo(model, batch, running, running)

    return loop(ActorCritic(), rollout(), loss_of)


@odd(notes="a time limit ends the episode and not the return: the value of the last observation stands in for the rest")
def ppo_with_time_limits():
    truncated = torch.zeros(12, 3)
    truncated[7, 1] = truncated[5, 2] = 1.0
    terminated = torch.zeros(12, 3)
    terminated[3, 0] = terminated[9, 0] = 1.0
    batch = rollout(final_obs=torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(9)))
    del batch["dones"]
    batch |= {"terminated": terminated, "truncated": truncated}

    def loss_of(model, batch):
        with torch.no_grad():
            bonus = GAMMA * model(batch["final_obs"])[1] * batch["truncated"]
        running = 1.0 - torch.maximum(batch["terminated"], batch["truncated"])
        return ppo(model, batch, running, running, bonus=bonus)

    return loop(ActorCritic(), batch, loss_of)


@odd(notes="dones say that an observation is the first of an episode, as the environment gave them before the step")
def ppo_with_flags_at_the_first_step():
    def loss_of(model, batch):
        starts = batch["dones"]
        running = 1.0 - torch.cat([starts[1:], torch.zeros_like(starts[:1])])
        return ppo(model, batch, running, running)

    return loop(ActorCritic(), rollout(), loss_of)


@odd(notes="returns are computed and standardised by numpy, over one flat rollout of steps with a reward of 1")
def reinforce_by_numpy_with_rewards_of_one():
    flat = rollout(steps=20, envs=1, ends=((4, 0), (11, 0)))
    flat["rewards"] = torch.ones(20, 1)

    def loss_of(model, batch):
        rewards, dones = batch["rewards"][:, 0].numpy(), batch["dones"][:, 0].numpy()
        returns, running = rewards.copy(), 0.0
        for step in reversed(range(len(rewards))):
            running = rewards[step] + GAMMA * running * (1 - dones[step])
            returns[step] = running
        returns = (returns - returns.mean()) / (returns.std() + 1e-9)
        logp = action_logp(model(batch["obs"][:, 0]), batch["actions"][:, 0])
        return -(logp * torch.as_tensor(returns, dtype=logp.dtype)).mean()

    return loop(Policy(), flat, loss_of)


@odd(notes="standardised returns less what the critic says of each step, and other names than usual (PPO-PyTorch)")
def returns_standardised_before_the_baseline():
    flat = {name: value[:, 0] for name, value in rollout(steps=20, envs=1, ends=((4, 0), (11, 0))).items()}
    flat |= {"is_terminals": flat.pop("dones") > 0, "last_obs": flat["obs"][-1]}

    def loss_of(model, batch):
        logits, values = model(batch["obs"])
        returns, running = [], 0.0
        for reward, ended in zip(batch["rewards"].tolist()[::-1], batch["is_terminals"].tolist()[::-1], strict=True):
            running = reward + GAMMA * running * (not ended)
            returns.insert(0, running)
        returns = torch.tensor(returns, dtype=values.dtype)
        returns = (returns - returns.mean()) / (returns.std() + 1e-7)
        policy = clipped(action_logp(logits, batch["actions"]), batch["logp"], returns - values.detach())
        return policy + 0.5 * F.mse_loss(values, returns)

    return loop(ActorCritic(), flat, loss_of)


@odd(notes="returns of three steps that stop at the end of an episode")
def three_step_returns():
    def loss_of(model, batch):
        rewards, running = batch["rewards"], 1.0 - batch["dones"]
        logits, values = model(batch["obs"])
        with torch.no_grad():
            after = torch.cat([values[1:], model(batch["last_obs"])[1][None]])
            returns = rewards + GAMMA * running * after
            for _ in range(2):
                later = torch.cat([returns[1:], model(batch["last_obs"])[1][None]])
                returns = rewards + GAMMA * running * later
        advantages = returns - values.detach()
        return F.mse_loss(values, returns) - (action_logp(logits, batch["actions"]) * advantages).mean()

    return loop(ActorCritic(), rollout(), loss_of)


@odd(notes="intrinsic returns go on over the ends of episodes, extrinsic ones do not")
def intrinsic_returns_without_ends():
    batch = rollout(intrinsic_rewards=torch.rand(12, 3, generator=torch.Generator().manual_seed(2)))

    def loss_of(model, batch):
        logits, values = model(batch["obs"])
        with torch.no_grad():
            last = model(batch["last_obs"])[1]
            running = 1.0 - batch["dones"]
            advantages = advantages_of(batch["rewards"], values, last, running, running)
            always = torch.ones_like(running)
            returns = advantages + values
            advantages = advantages + 0.5 * advantages_of(batch["intrinsic_rewards"], values, last, always, always)
        return clipped(action_logp(logits, batch["actions"]), batch["logp"], advantages) + F.mse_loss(values, returns)

    return loop(ActorCritic(), batch, loss_of)


@odd(notes="every row is one episode, and what follows its end is padding with rewards of 0")
def episodes_in_rows_with_padding():
    lengths, steps = torch.tensor([5, 8, 3, 8]), 8
    real = torch.arange(steps) < lengths[:, None]
    g = torch.Generator().manual_seed(4)
    batch = {
        "obs": torch.randn(4, steps, 4, generator=g) * real[..., None],
        "actions": torch.randint(3, (4, steps), generator=g) * real,
        "rewards": torch.randn(4, steps, generator=g) * real,
        "dones": (torch.arange(steps) == lengths[:, None] - 1).float(),
    }

    def loss_of(model, batch):
        rewards = batch["rewards"]
        weights = GAMMA ** torch.arange(steps, dtype=rewards.dtype)
        returns = (rewards * weights).flip(1).cumsum(1).flip(1) / weights
        keep = (batch["dones"].cumsum(1) - batch["dones"]) == 0
        logp = action_logp(model(batch["obs"]), batch["actions"])
        return -(logp * returns)[keep].sum() / keep.sum()

    return loop(Policy(), batch, loss_of)


def stepwise(**more):
    given = rollout(steps=16, envs=1, ends=((4, 0), (9, 0)))
    batch = {name: given[name][:, 0] for name in ("obs", "actions", "rewards", "dones")}
    return {**batch, "next_obs": torch.randn(16, 4, generator=torch.Generator().manual_seed(8)), **more}


@odd(notes="time limits end episodes here, and their targets go on: the flag of real ends says which")
def targets_go_on_at_time_limits():
    batch = stepwise(truncated=(torch.arange(16) == 9).float())

    def loss_of(model, batch):
        chosen = model(batch["obs"]).gather(1, batch["actions"][:, None])[:, 0]
        with torch.no_grad():
            after = model(batch["next_obs"]).max(1).values
            ends = batch["dones"] * (1 - batch["truncated"])
            target = batch["rewards"] + GAMMA * (1 - ends) * after
        return F.smooth_l1_loss(chosen, target)

    return loop(Policy(), batch, loss_of)


@odd(notes="a model of the world predicts rewards and what comes next, at the last step of an episode too")
def model_of_the_world():
    class World(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.next, self.reward = nn.Linear(5, 16), nn.Linear(16, 4), nn.Linear(16, 1)
            self.end = nn.Linear(16, 1)

        def forward(self, obs, actions):
            hidden = torch.tanh(self.body(torch.cat([obs, actions[:, None].to(obs)], 1)))
            return self.next(hidden), self.reward(hidden)[:, 0], self.end(hidden)[:, 0]

    def loss_of(model, batch):
        after, reward, end = model(batch["obs"], batch["actions"])
        found = F.mse_loss(after, batch["next_obs"]) + F.mse_loss(reward, batch["rewards"])
        return found + F.binary_cross_entropy_with_logits(end, batch["dones"])

    return loop(World(), stepwise(), loss_of)


@odd(notes="a bonus for what is new about the next observation, also where it is the last one")
def bonus_for_new_observations():
    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.agent, self.target, self.guess = Policy(), nn.Linear(4, 6), nn.Linear(4, 6)
            self.target.requires_grad_(requires_grad=False)

    def loss_of(model, batch):
        apart = (model.guess(batch["next_obs"]) - model.target(batch["next_obs"])).square().mean(1)
        chosen = model.agent(batch["obs"]).gather(1, batch["actions"][:, None])[:, 0]
        with torch.no_grad():
            after = model.agent(batch["next_obs"]).max(1).values
            target = batch["rewards"] + 0.1 * apart.detach() + GAMMA * (1 - batch["dones"]) * after
        return F.smooth_l1_loss(chosen, target) + apart.mean()

    return loop(Curious(), stepwise(), loss_of, frozen=["target."])


@odd(notes="actions are cloned; rewards and next observations of the data set are not read")
def cloned_actions():
    def loss_of(model, batch):
        return F.cross_entropy(model(batch["obs"]), batch["actions"])

    return loop(Policy(), stepwise(), loss_of)
