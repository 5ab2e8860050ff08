"""Returns and advantages that run on into the next episode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.pairs import pair
from tests.loops.plain import loop
from tests.loops.segmented import ActorCritic, Policy, action_logp, advantages_of, rollout

GAMMA = 0.97


def ppo(keep, *, batch=rollout, normalise=True):
    def loss_of(model, batch):
        logits, values = model(batch["obs"])
        with torch.no_grad():
            last = model(batch["last_obs"])[1]
            value_kept, sum_kept = keep(batch)
            advantages = advantages_of(batch["rewards"], values, last, value_kept, sum_kept)
            returns = advantages + values
        if normalise:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (action_logp(logits, batch["actions"]) - batch["logp"]).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return policy + 0.5 * F.mse_loss(values, returns)

    return lambda: loop(ActorCritic(), batch(), loss_of)


def cut(batch):
    running = 1.0 - batch["dones"]
    return running, running


def never(batch):
    return torch.ones_like(batch["dones"]), torch.ones_like(batch["dones"])


def value_alone(batch):
    return 1.0 - batch["dones"], torch.ones_like(batch["dones"])


pair(
    "advantages_run_over_the_ends_of_episodes",
    "segment_independence",
    "returns_across_episodes",
    faulty=ppo(never),
    fixed=ppo(cut),
    culprits=("rewards",),
    quick=True,
)

pair(
    "running_advantage_not_cut_where_the_value_is",
    "segment_independence",
    "returns_across_episodes",
    faulty=ppo(value_alone, normalise=False),
    fixed=ppo(cut, normalise=False),
)


def reinforce(*, resets, numpy=False):
    """Returns of a flat rollout of CartPole, every reward is 1."""

    def make():
        flat = rollout(steps=24, envs=1, ends=((5, 0), (13, 0)))
        batch = {name: flat[name][:, 0] for name in ("obs", "actions", "dones")}
        batch["rewards"] = torch.ones(24)

        def loss_of(model, batch):
            returns, running = [], 0.0
            for reward, done in zip(
                reversed(batch["rewards"].tolist()), reversed(batch["dones"].tolist()), strict=True
            ):
                if resets and done:
                    running = 0.0
                running = reward + GAMMA * running
                returns.insert(0, running)
            logp = action_logp(model(batch["obs"]), batch["actions"])
            weights = torch.tensor(returns)
            weights = (weights - weights.mean()) / (weights.std() + 1e-9)
            return -(logp * weights).mean()

        return loop(Policy(), batch, loss_of)

    return make


pair(
    "returns_of_a_flat_rollout_without_its_ends",
    "segment_independence",
    "returns_across_episodes",
    faulty=reinforce(resets=False),
    fixed=reinforce(resets=True),
    where="(weights - weights.mean())",
)


def by_cumsum(*, each):
    """Returns by a cumulative sum over the whole row, or over the steps of each episode."""

    def make():
        batch = {name: value.transpose(0, 1) for name, value in rollout().items() if name in ("obs", "actions")}
        batch |= {"rewards": rollout()["rewards"].T.contiguous(), "dones": rollout()["dones"].T.bool()}

        def loss_of(model, batch):
            rewards = batch["rewards"]
            steps = torch.arange(rewards.shape[1])
            discounted = rewards * GAMMA**steps
            returns = discounted.flip(1).cumsum(1).flip(1)
            if each:
                episode = batch["dones"].long().cumsum(1) - batch["dones"].long()
                same = (episode[:, :, None] == episode[:, None, :]).to(rewards)
                returns = (discounted[:, None, :] * same * (steps[None, :] >= steps[:, None])).sum(2)
            returns = returns / GAMMA**steps
            return -(action_logp(model(batch["obs"]), batch["actions"]) * returns).mean()

        return loop(Policy(), batch, loss_of)

    return make


pair(
    "cumulative_sum_over_all_episodes_of_a_row",
    "segment_independence",
    "returns_across_episodes",
    faulty=by_cumsum(each=False),
    fixed=by_cumsum(each=True),
    where="returns / GAMMA**steps",
)


def limits(keep):
    def batch():
        given = rollout()
        given["truncated"] = given.pop("dones")
        return given

    return ppo(keep, batch=batch)


pair(
    "advantages_run_over_time_limits",
    "segment_independence",
    "returns_across_episodes",
    faulty=limits(lambda b: (torch.ones_like(b["truncated"]), torch.ones_like(b["truncated"]))),
    fixed=limits(lambda b: (1.0 - b["truncated"], 1.0 - b["truncated"])),
    level="advice",
)


class RecurrentPolicy(nn.Module):
    """A recurrent policy over a rollout, whose state is cleared where an episode ended before the step, or never."""

    def __init__(self, *, clears):
        super().__init__()
        self.cell, self.policy, self.clears = nn.GRUCell(4, 16), nn.Linear(16, 3), clears

    def forward(self, obs, dones):
        state, out = torch.zeros(obs.shape[1], 16, dtype=obs.dtype), []
        for step in range(len(obs)):
            if self.clears and step:
                state = state * (1 - dones[step - 1])[:, None]
            state = self.cell(obs[step], state)
            out.append(self.policy(state))
        return torch.stack(out)


def recurrent(*, clears, **fields):
    def loss_of(model, batch):
        with torch.no_grad():
            returns, running = torch.zeros_like(batch["rewards"]), torch.zeros_like(batch["rewards"][0])
            for step in reversed(range(len(returns))):
                running = batch["rewards"][step] + GAMMA * running * (1 - batch["dones"][step])
                returns[step] = running
        return -(action_logp(model(batch["obs"], batch["dones"]), batch["actions"]) * returns).mean()

    return lambda: loop(RecurrentPolicy(clears=clears), rollout(), loss_of, **fields)


pair(
    "recurrent_state_goes_on_into_the_next_episode",
    "segment_independence",
    "segments_interact",
    faulty=recurrent(clears=False),
    fixed=recurrent(clears=True),
    level="advice",
    mentions=("episodes",),
)
