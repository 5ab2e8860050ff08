"""Returns and advantages that run on into the next episode."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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


pair(
    "advantages_run_over_the_ends_of_episodes",
    "segment_independence",
    "returns_across_episodes",
    faulty=ppo(never),
    fixed=ppo(cut),
    culprits=("rewards",),
    quick=True,
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
