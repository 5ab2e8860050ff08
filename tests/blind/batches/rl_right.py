"""Returns, advantages and targets as they should be, though rows meet in many of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator
from tests.blind.cases import right


class ActorCritic(nn.Module):
    def __init__(self, obs=5, actions=3, hidden=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh())
        self.actor = nn.Linear(hidden, actions)
        self.critic = nn.Linear(hidden, 1)

    def forward(self, obs):
        hidden = self.body(obs)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


def mlp(inputs, outputs, hidden=20):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def polyak(net, target, tau=0.05):
    with torch.no_grad():
        for p, t in zip(net.parameters(), target.parameters(), strict=True):
            t.lerp_(p, tau)


@right(
    "rl",
    "dones[t] says that step t begins an episode: GAE looks at dones[t + 1] and next_done, as in the script",
    thread="vwxyzjn/cleanrl#287",
)
def cleanrl_ppo():
    torch.manual_seed(0)
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    gamma, gae_lambda, minibatches = 0.99, 0.95, 2

    def update(data):
        steps, envs = data["rewards"].shape
        with torch.no_grad():
            dist, values = agent(data["obs"])
            logprobs, next_value = dist.log_prob(data["actions"]), agent(data["next_obs"])[1]
            advantages, lastgaelam = torch.zeros_like(values), 0
            for t in reversed(range(steps)):
                if t == steps - 1:
                    nextnonterminal, nextvalues = 1.0 - data["next_done"], next_value
                else:
                    nextnonterminal, nextvalues = 1.0 - data["dones"][t + 1], values[t + 1]
                delta = data["rewards"][t] + gamma * nextvalues * nextnonterminal - values[t]
                advantages[t] = lastgaelam = delta + gamma * gae_lambda * nextnonterminal * lastgaelam
            returns = advantages + values
        b_obs, b_actions = data["obs"].flatten(0, 1), data["actions"].flatten()
        b_logprobs, b_advantages, b_returns = logprobs.flatten(), advantages.flatten(), returns.flatten()
        for index in torch.randperm(steps * envs).chunk(minibatches):
            dist, newvalue = agent(b_obs[index])
            ratio = (dist.log_prob(b_actions[index]) - b_logprobs[index]).exp()
            adv = b_advantages[index]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            v_loss = 0.5 * (newvalue - b_returns[index]).square().mean()
            loss = pg_loss - 0.01 * dist.entropy().mean() + 0.5 * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()

    def collect(steps=8, envs=6):
        return {
            "obs": torch.randn(steps, envs, 5),
            "actions": torch.randint(0, 3, (steps, envs)),
            "rewards": torch.randn(steps, envs),
            "dones": (torch.rand(steps, envs) < 0.2).float(),
            "next_obs": torch.randn(envs, 5),
            "next_done": (torch.rand(envs) < 0.2).float(),
        }

    return TrainLoop(
        model=agent,
        optimizer=optimizer,
        batches=lambda n: [collect() for _ in range(n)],
        fit=lambda batches: [update(data) for data in batches],
    )


@right(
    "rl",
    "at a time limit the value of the last observation is added to the reward, and the advantage is cut there",
    thread="DLR-RM/stable-baselines3#1864",
)
def time_limit_bootstrap():
    torch.manual_seed(0)
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)

    def update(r):
        with torch.no_grad():
            _, values = agent(r["obs"])
            terminal_values = agent(r["terminal_obs"])[1]
            rewards = r["rewards"] + 0.99 * terminal_values * r["truncated"]
            last_values = agent(r["last_obs"])[1]
            advantages, last = torch.zeros_like(values), 0.0
            for step in reversed(range(rewards.shape[1])):
                end = step == rewards.shape[1] - 1
                following = last_values if end else values[:, step + 1]
                alive = 1.0 - r["dones"][:, step]
                delta = rewards[:, step] + 0.99 * following * alive - values[:, step]
                advantages[:, step] = last = delta + 0.99 * 0.95 * alive * last
            returns = advantages + values
        dist, values = agent(r["obs"])
        loss = F.mse_loss(values, returns) - (dist.log_prob(r["actions"]) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def collect(envs=7, steps=9):
        dones = (torch.rand(envs, steps) < 0.25).float()
        return {
            "obs": torch.randn(envs, steps, 5),
            "terminal_obs": torch.randn(envs, steps, 5),
            "last_obs": torch.randn(envs, 5),
            "actions": torch.randint(0, 3, (envs, steps)),
            "rewards": torch.randn(envs, steps),
            "dones": dones,
            "truncated": dones * (torch.rand(envs, steps) < 0.5),
        }

    return TrainLoop(
        model=agent,
        optimizer=optimizer,
        batches=[collect() for _ in range(4)],
        fit=lambda batches: [update(r) for r in batches],
    )


@right(
    "rl",
    "n-step returns: rewards up to the first done count, and the value behind them where there was none",
    thread="thu-ml/tianshou#135",
)
def n_step_returns():
    torch.manual_seed(0)
    net = mlp(4, 3)
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    gamma, n_step = 0.97, 3

    class Samples(NamedTuple):
        obs: torch.Tensor
        act: torch.Tensor
        rewards: torch.Tensor
        dones: torch.Tensor
        obs_next: torch.Tensor

    def train(batches):
        for s in batches:
            alive = torch.cat([torch.ones(len(s.dones), 1), (1 - s.dones).cumprod(1)], dim=1)
            reward = (s.rewards * alive[:, :-1] * gamma ** torch.arange(n_step)).sum(1)
            with torch.no_grad():
                bootstrap = target(s.obs_next).gather(1, net(s.obs_next).argmax(1, keepdim=True)).squeeze(1)
                returns = reward + gamma**n_step * alive[:, -1] * bootstrap
            q = net(s.obs)[torch.arange(len(s.act)), s.act]
            loss = F.huber_loss(q, returns)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            polyak(net, target)

    def draw(n=12):
        return Samples(
            torch.randn(n, 4),
            torch.randint(0, 3, (n,)),
            torch.randn(n, n_step),
            (torch.rand(n, n_step) < 0.2).float(),
            torch.randn(n, 4),
        )

    return TrainLoop(
        model={"net": net, "target": target},
        optimizer=optimizer,
        batches=lambda n: [draw() for _ in range(n)],
        fit=train,
        frozen=("target",),
    )


@right(
    "rl",
    "V-trace over (time, actors): targets run backwards in time, clipped ratios, discounts of zero at ends",
    thread="pytorch/rl#1506",
)
def v_trace():
    torch.manual_seed(0)
    model = ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=4e-4, eps=0.01)

    @torch.no_grad()
    def from_importance_weights(log_rhos, discounts, rewards, values, bootstrap):
        rhos = log_rhos.exp()
        clipped = rhos.clamp(max=1.0)
        following = torch.cat([values[1:], bootstrap[None]])
        deltas = clipped * (rewards + discounts * following - values)
        acc, result = torch.zeros_like(bootstrap), []
        for t in reversed(range(len(discounts))):
            acc = deltas[t] + discounts[t] * clipped[t] * acc
            result.append(acc)
        vs = torch.stack(result[::-1]) + values
        vs_next = torch.cat([vs[1:], bootstrap[None]])
        return vs, clipped * (rewards + discounts * vs_next - values)

    def learn(batch):
        dist, values = model(batch["obs"])
        bootstrap, values = values[-1], values[:-1]
        log_probs = dist.log_prob(batch["action"])[:-1]
        discounts = 0.99 * (~batch["done"][1:]).float()
        vs, advantages = from_importance_weights(
            (log_probs - batch["behaviour"][:-1]).detach(), discounts, batch["reward"][1:], values, bootstrap
        )
        pg_loss = -(log_probs * advantages).sum()
        baseline_loss = 0.5 * (vs - values).pow(2).sum()
        entropy_loss = -dist.entropy()[:-1].sum()
        optimizer.zero_grad()
        (pg_loss + 0.5 * baseline_loss + 0.0006 * entropy_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 40.0)
        optimizer.step()

    def unroll(steps=9, actors=4):
        return {
            "obs": torch.randn(steps, actors, 5),
            "action": torch.randint(0, 3, (steps, actors)),
            "behaviour": torch.randn(steps, actors).sub(1),
            "reward": torch.randn(steps, actors),
            "done": torch.rand(steps, actors) < 0.2,
        }

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [unroll() for _ in range(n)],
        fit=lambda batches: [learn(batch) for batch in batches],
        batch_dim=1,
    )


@right(
    "rl",
    "weights are divided by the largest of the batch; the priorities that are written back are weighted losses",
    thread="Kaixhin/Rainbow#24",
)
def prioritized_weights():
    torch.manual_seed(0)
    online = mlp(4, 3)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, eps=1.5e-4)
    priorities = torch.ones(64)

    def learn(b):
        probabilities = b["priority"] / 64
        weights = (64 * probabilities) ** -0.4
        weights = weights / weights.max()
        with torch.no_grad():
            following = target(b["next_obs"]).max(1).values
            y = b["reward"] + 0.99 * b["nonterminal"] * following
        q = online(b["obs"]).gather(1, b["action"][:, None]).squeeze(1)
        loss = weights * (y - q).pow(2)
        optimizer.zero_grad()
        loss.mean().backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        priorities[b["index"]] = loss.detach().float() ** 0.5
        polyak(online, target)

    def sample(n=11):
        return {
            "index": torch.randperm(64)[:n],
            "priority": torch.rand(n) + 0.1,
            "obs": torch.randn(n, 4),
            "action": torch.randint(0, 3, (n,)),
            "reward": torch.randn(n),
            "next_obs": torch.randn(n, 4),
            "nonterminal": (torch.rand(n) > 0.2).float(),
        }

    return TrainLoop(
        model={"online": online, "target": target},
        optimizer=optimizer,
        batches=lambda n: [sample() for _ in range(n)],
        fit=lambda batches: [learn(b) for b in batches],
        frozen=("target",),
    )


@right(
    "rl",
    "QR-DQN compares (n, quantiles, 1) with (n, 1, quantiles): all pairs of quantiles of one transition",
    thread="thu-ml/tianshou#945",
)
def quantile_regression():
    torch.manual_seed(0)
    quantiles, actions = 5, 3
    net = nn.Sequential(mlp(4, actions * quantiles), nn.Unflatten(1, (actions, quantiles)))
    old = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    tau = (torch.arange(quantiles) + 0.5) / quantiles

    def train(batches):
        for obs, act, rew, obs_next, done in batches:
            rows = torch.arange(len(act))
            with torch.no_grad():
                following = old(obs_next)
                best = following.mean(2).argmax(1)
                target_dist = (rew[:, None] + 0.99 * (1 - done)[:, None] * following[rows, best]).unsqueeze(1)
            curr_dist = net(obs)[rows, act].unsqueeze(2)
            u = F.smooth_l1_loss(*torch.broadcast_tensors(target_dist, curr_dist), reduction="none")
            below = (target_dist - curr_dist).detach().le(0.0).float()
            loss = (u * (tau.view(1, -1, 1) - below).abs()).sum(1).mean(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            polyak(net, old)

    def draw(n=8):
        return (
            torch.randn(n, 4),
            torch.randint(0, actions, (n,)),
            torch.randn(n),
            torch.randn(n, 4),
            (torch.rand(n) < 0.2).float(),
        )

    return TrainLoop(
        model={"net": net, "old": old},
        optimizer=optimizer,
        batches=[draw() for _ in range(4)],
        fit=train,
        frozen=("old",),
    )


@right(
    "rl",
    "advantages are normalised over the whole rollout, over steps and environments",
    thread="ikostrikov/pytorch-a2c-ppo-acktr-gail#102",
)
def whole_rollout_advantages():
    torch.manual_seed(0)
    actor_critic = ActorCritic()
    optimizer = torch.optim.Adam(actor_critic.parameters(), lr=7e-4, eps=1e-5)

    class PPO:
        def __init__(self, clip_param=0.2, ppo_epoch=2, value_loss_coef=0.5):
            self.clip_param, self.ppo_epoch, self.value_loss_coef = clip_param, ppo_epoch, value_loss_coef

        def update(self, r):
            advantages = r["returns"] - r["value_preds"]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
            for _ in range(self.ppo_epoch):
                dist, values = actor_critic(r["obs"])
                ratio = torch.exp(dist.log_prob(r["actions"]) - r["log_probs"])
                clipped = ratio.clamp(1 - self.clip_param, 1 + self.clip_param)
                action_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
                near = r["value_preds"] + (values - r["value_preds"]).clamp(-self.clip_param, self.clip_param)
                value_loss = 0.5 * torch.max((values - r["returns"]) ** 2, (near - r["returns"]) ** 2).mean()
                optimizer.zero_grad()
                (value_loss * self.value_loss_coef + action_loss - dist.entropy().mean() * 0.01).backward()
                nn.utils.clip_grad_norm_(actor_critic.parameters(), 0.5)
                optimizer.step()

    def collect(steps=7, envs=4):
        return {
            "obs": torch.randn(steps, envs, 5),
            "actions": torch.randint(0, 3, (steps, envs)),
            "log_probs": torch.full((steps, envs), -1.1),
            "returns": torch.randn(steps, envs),
            "value_preds": torch.randn(steps, envs) * 0.1,
        }

    return TrainLoop(
        model=actor_critic,
        optimizer=optimizer,
        batches=lambda n: [collect() for _ in range(n)],
        fit=lambda batches: [PPO().update(r) for r in batches],
    )


@right(
    "rl",
    "the LSTM goes through the rollout step by step and its state is multiplied by 1 - episode_start of each row",
    thread="Stable-Baselines-Team/stable-baselines3-contrib#169",
)
def recurrent_ppo():
    torch.manual_seed(0)

    class RecurrentPolicy(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 12)
            self.action_net, self.value_net = nn.Linear(12, 3), nn.Linear(12, 1)

        def forward(self, features, state, episode_starts):
            outputs = []
            for x, start in zip(features, episode_starts, strict=True):
                keep = (1.0 - start).view(1, -1, 1)
                out, state = self.lstm(x.unsqueeze(0), (keep * state[0], keep * state[1]))
                outputs.append(out)
            latent = torch.cat(outputs)
            return Categorical(logits=self.action_net(latent)), self.value_net(latent).squeeze(-1)

    policy = RecurrentPolicy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)

    def update(r):
        dist, values = policy(r["obs"], (r["h"], r["c"]), r["episode_starts"])
        ratio = (dist.log_prob(r["actions"]) - r["old_log_prob"]).exp()
        policy_loss = -torch.min(r["advantages"] * ratio, r["advantages"] * ratio.clamp(0.8, 1.2)).mean()
        loss = policy_loss + 0.5 * F.mse_loss(r["returns"], values) - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def collect(steps=6, envs=5):
        return {
            "obs": torch.randn(steps, envs, 4),
            "h": torch.randn(1, envs, 12) * 0.1,
            "c": torch.randn(1, envs, 12) * 0.1,
            "episode_starts": (torch.rand(steps, envs) < 0.3).float(),
            "actions": torch.randint(0, 3, (steps, envs)),
            "old_log_prob": torch.full((steps, envs), -1.1),
            "advantages": torch.randn(steps, envs),
            "returns": torch.randn(steps, envs),
        }

    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batches=[collect() for _ in range(4)],
        fit=lambda batches: [update(r) for r in batches],
        batch_dim=1,
    )


@right(
    "rl",
    "the mask of learned steps is the discount moved by one with ones in front: the step that ends an episode counts",
    thread="google-deepmind/acme#239",
)
def r2d2_mask():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.q = nn.GRU(4, 12), nn.Linear(12, 3)

        def forward(self, obs):
            return self.q(self.gru(obs)[0])

    online = Net()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    burn_in = 2

    def learn(d):
        q = online(d["obs"])
        with torch.no_grad():
            best = q[1:].argmax(-1, keepdim=True)
            following = target(d["obs"])[1:].gather(-1, best).squeeze(-1)
            y = d["reward"][:-1] + 0.99 * d["discount"][:-1] * following
        chosen = q[:-1].gather(-1, d["action"][:-1, :, None]).squeeze(-1)
        alive = torch.cat([torch.ones_like(d["discount"][:1]), d["discount"][:-2].cumprod(0)])
        error = 0.5 * (y - chosen).square()[burn_in:] * alive[burn_in:]
        loss = (error.sum(0) / (alive[burn_in:].sum(0) + 1e-5)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        polyak(online, target)

    def draw(steps=8, rows=6):
        ends = torch.randint(3, 12, (rows,))
        return {
            "obs": torch.randn(steps, rows, 4),
            "action": torch.randint(0, 3, (steps, rows)),
            "reward": torch.randn(steps, rows),
            "discount": (torch.arange(steps)[:, None] != ends).float(),
        }

    return TrainLoop(
        model={"online": online, "target": target},
        optimizer=optimizer,
        batches=lambda n: [draw() for _ in range(n)],
        fit=lambda batches: [learn(d) for d in batches],
        batch_dim=1,
        frozen=("target",),
    )


class TinyLM(nn.Module):
    def __init__(self, vocab=16, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def log_probs(self, ids):
        states, _ = self.rnn(self.embed(ids[:, :-1]))
        return self.head(states).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def completions(prompts=4, group=3):
    mask = torch.arange(6) < torch.randint(2, 7, (prompts * group, 1))
    return {
        "prompt": torch.randint(1, 16, (prompts, 4)),
        "completion": torch.randint(1, 16, (prompts * group, 6)) * mask,
        "mask": mask.float(),
        "reward": torch.randn(prompts * group),
    }


@right(
    "rl",
    "the reward minus the mean of its group, not divided by its deviation; tokens are summed over a constant",
    thread="thinking-machines-lab/tinker-cookbook#579",
)
def centred_groups():
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group, max_tokens = 3, 6

    def step(b):
        ids = torch.cat([b["prompt"].repeat_interleave(group, 0), b["completion"]], 1)
        rewards = b["reward"].view(-1, group)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        logp = model.log_probs(ids)[:, 3:]
        ratio = (logp - logp.detach()).exp()
        loss = -(ratio * advantages[:, None] * b["mask"]).sum() / (len(ids) * max_tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [completions() for _ in range(n)],
        fit=lambda batches: [step(b) for b in batches],
    )


@right(
    "rl",
    "group statistics first and then a whitening over all tokens of the batch, as the option says",
    thread="amazon-science/reskill#12",
)
def whitened_groups():
    torch.manual_seed(0)
    policy, reference = TinyLM(), TinyLM()
    reference.load_state_dict(policy.state_dict())
    reference.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    @dataclass
    class Config:
        group: int = 3
        double_normalize: bool = True
        kl_coef: float = 0.02

    config = Config()

    def masked_whiten(values, mask):
        mean = (values * mask).sum() / mask.sum()
        variance = ((values - mean) ** 2 * mask).sum() / mask.sum()
        return (values - mean) * (variance + 1e-8).rsqrt()

    def step(b):
        ids = torch.cat([b["prompt"].repeat_interleave(config.group, 0), b["completion"]], 1)
        scores = b["reward"].view(-1, config.group)
        scores = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
        advantages = scores.flatten()[:, None] * b["mask"]
        if config.double_normalize:
            advantages = masked_whiten(advantages, b["mask"]) * b["mask"]
        logp = policy.log_probs(ids)[:, 3:]
        with torch.no_grad():
            ref = reference.log_probs(ids)[:, 3:]
        kl = (ref - logp).exp() - (ref - logp) - 1
        objective = (logp - logp.detach()).exp() * advantages - config.kl_coef * kl
        loss = -(objective * b["mask"]).sum() / b["mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return TrainLoop(
        model={"policy": policy, "reference": reference},
        optimizer=optimizer,
        batches=[completions() for _ in range(4)],
        fit=lambda batches: [step(b) for b in batches],
        frozen=("reference",),
    )


@right(
    "rl",
    "the whole batch is one group on purpose: rewards of all conversations are centred together",
    thread="aiming-lab/MetaClaw#58",
)
def conversations_as_group():
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    class Sample(NamedTuple):
        ids: torch.Tensor
        loss_mask: torch.Tensor
        reward: torch.Tensor

    def compute_advantages(rewards, eps=1e-8):
        return (rewards - rewards.mean()) / (rewards.std(unbiased=False) + eps)

    def train(batches):
        for s in batches:
            advantages = compute_advantages(s.reward)
            logp = model.log_probs(s.ids) * s.loss_mask[:, 1:]
            loss = -(logp.sum(1) / s.loss_mask[:, 1:].sum(1).clamp(min=1) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw(n=8):
        mask = (torch.arange(9) >= torch.randint(2, 6, (n, 1))).float()
        return Sample(torch.randint(0, 16, (n, 9)), mask, torch.rand(n))

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [draw() for _ in range(n)], fit=train)


@right(
    "rl",
    "the temperature's loss has log_alpha in place of alpha, and the log-probability of the actions without gradient",
    thread="rail-berkeley/rlkit#71",
)
def soft_actor_critic():
    torch.manual_seed(0)
    actor = mlp(4, 4)
    qf = nn.ModuleList(mlp(6, 1) for _ in range(2))
    target_qf = copy.deepcopy(qf).requires_grad_(False)
    temperature = nn.ParameterDict({"log_alpha": nn.Parameter(torch.zeros(1))})
    actor_opt = torch.optim.Adam(actor.parameters(), lr=3e-4)
    qf_opt = torch.optim.Adam(qf.parameters(), lr=3e-4)
    alpha_opt = torch.optim.Adam(temperature.parameters(), lr=3e-4)
    target_entropy = -2.0

    def act(obs):
        mean, log_std = actor(obs).chunk(2, -1)
        dist = Normal(mean, log_std.clamp(-5, 2).exp())
        raw = dist.rsample()
        action = raw.tanh()
        correction = 2 * (0.6931 - raw - F.softplus(-2 * raw))
        return action, (dist.log_prob(raw) - correction).sum(-1, keepdim=True)

    def q(nets, obs, action):
        return [net(torch.cat([obs, action], -1)) for net in nets]

    def update(b):
        new_action, log_pi = act(b["obs"])
        alpha_loss = -(temperature["log_alpha"] * (log_pi + target_entropy).detach()).mean()
        alpha_opt.zero_grad()
        alpha_loss.backward()
        alpha_opt.step()
        alpha = temperature["log_alpha"].exp().detach()
        policy_loss = (alpha * log_pi - torch.min(*q(qf, b["obs"], new_action))).mean()
        actor_opt.zero_grad()
        policy_loss.backward()
        actor_opt.step()
        with torch.no_grad():
            next_action, next_log_pi = act(b["next_obs"])
            value = torch.min(*q(target_qf, b["next_obs"], next_action)) - alpha * next_log_pi
            y = b["reward"] + (1 - b["terminal"]) * 0.99 * value
        qf_loss = sum(F.mse_loss(prediction, y) for prediction in q(qf, b["obs"], b["action"]))
        qf_opt.zero_grad()
        qf_loss.backward()
        qf_opt.step()
        polyak(qf, target_qf, 0.005)

    def sample(n=10):
        return {
            "obs": torch.randn(n, 4),
            "action": torch.rand(n, 2) * 2 - 1,
            "reward": torch.randn(n, 1),
            "next_obs": torch.randn(n, 4),
            "terminal": (torch.rand(n, 1) < 0.1).float(),
        }

    return TrainLoop(
        model={"actor": actor, "qf": qf, "target_qf": target_qf, "temperature": temperature},
        optimizer=[actor_opt, qf_opt, alpha_opt],
        batches=lambda n: [sample() for _ in range(n)],
        fit=lambda batches: [update(b) for b in batches],
        frozen=("target_qf",),
    )


@right(
    "rl",
    "terminal1 is stored as 0 at an end and 1 else, so the target multiplies by it",
    thread="ghliu/pytorch-ddpg#6",
)
def stored_as_not_done():
    torch.manual_seed(0)
    actor, critic = nn.Sequential(mlp(4, 1), nn.Tanh()), mlp(5, 1)
    actor_target = copy.deepcopy(actor).requires_grad_(False)
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    actor_optim = torch.optim.Adam(actor.parameters(), lr=1e-4)
    critic_optim = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def sample_and_split(n=12):
        ended = torch.rand(n, 1) < 0.1
        terminal1 = torch.where(ended, 0.0, 1.0)
        return torch.randn(n, 4), torch.randn(n, 1).tanh(), torch.randn(n, 1), torch.randn(n, 4), terminal1

    def update_policy(batch):
        state, action, reward, next_state, terminal = batch
        with torch.no_grad():
            next_q = critic_target(torch.cat([next_state, actor_target(next_state)], 1))
            target_q = reward + 0.99 * terminal * next_q
        critic.zero_grad()
        value_loss = F.mse_loss(critic(torch.cat([state, action], 1)), target_q)
        value_loss.backward()
        critic_optim.step()
        actor.zero_grad()
        policy_loss = -critic(torch.cat([state, actor(state)], 1)).mean()
        policy_loss.backward()
        actor_optim.step()
        polyak(actor, actor_target, 0.001)
        polyak(critic, critic_target, 0.001)

    return TrainLoop(
        model={
            "actor": actor,
            "critic": critic,
            "actor_target": actor_target,
            "critic_target": critic_target,
        },
        optimizer=[actor_optim, critic_optim],
        batches=[sample_and_split() for _ in range(4)],
        fit=lambda batches: [update_policy(b) for b in batches],
        frozen=("actor_target", "critic_target"),
    )


@right(
    "rl",
    "AWAC: weights are a softmax of the advantages over the rows of the batch, times their number",
    thread="rail-berkeley/rlkit#130",
)
def advantage_weighted():
    torch.manual_seed(0)
    policy, qf = mlp(4, 4), mlp(6, 1)
    target_qf = copy.deepcopy(qf).requires_grad_(False)
    policy_opt = torch.optim.Adam(policy.parameters(), lr=3e-4, weight_decay=1e-4)
    qf_opt = torch.optim.Adam(qf.parameters(), lr=3e-4)

    def dist(obs):
        mean, log_std = policy(obs).chunk(2, -1)
        return Independent(Normal(mean, log_std.clamp(-4, 1).exp()), 1)

    def q(obs, action, net=qf):
        return net(torch.cat([obs, action], -1)).squeeze(-1)

    def update(b):
        with torch.no_grad():
            following = q(b["next_obs"], dist(b["next_obs"]).sample(), target_qf)
            y = b["reward"] + 0.99 * (1 - b["done"]) * following
        qf_loss = F.mse_loss(q(b["obs"], b["action"]), y)
        qf_opt.zero_grad()
        qf_loss.backward()
        qf_opt.step()
        d = dist(b["obs"])
        with torch.no_grad():
            score = q(b["obs"], b["action"]) - q(b["obs"], d.mean)
            weights = F.softmax(score / 0.5, dim=0)
        policy_loss = (-d.log_prob(b["action"]) * len(weights) * weights).mean()
        policy_opt.zero_grad()
        policy_loss.backward()
        policy_opt.step()
        polyak(qf, target_qf, 0.005)

    def sample(n=14):
        return {
            "obs": torch.randn(n, 4),
            "action": torch.randn(n, 2),
            "reward": torch.randn(n),
            "next_obs": torch.randn(n, 4),
            "done": (torch.rand(n) < 0.1).float(),
        }

    return TrainLoop(
        model={"policy": policy, "qf": qf, "target_qf": target_qf},
        optimizer=[policy_opt, qf_opt],
        batches=lambda n: [sample() for _ in range(n)],
        fit=lambda batches: [update(b) for b in batches],
        frozen=("target_qf",),
    )


@right(
    "rl",
    "the discounts of the imagined steps are multiplied up along the horizon, dimension 0, beginning at one",
    thread="juliusfrost/dreamer-pytorch#59",
)
def imagined_horizon():
    torch.manual_seed(0)
    dynamics = nn.GRUCell(3, 12).requires_grad_(False)
    reward_head = nn.Linear(12, 1).requires_grad_(False)
    continue_head = nn.Linear(12, 1).requires_grad_(False)
    actor, value = nn.Sequential(mlp(12, 3), nn.Tanh()), mlp(12, 1)
    opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    opt_value = torch.optim.Adam(value.parameters(), lr=1e-3)

    def train(batches):
        for state in batches:
            states = []
            for _ in range(5):
                state = dynamics(actor(state.detach()), state)
                states.append(state)
            states = torch.stack(states)
            reward, values = reward_head(states).squeeze(-1), value(states).squeeze(-1)
            discount = 0.99 * continue_head(states).squeeze(-1).sigmoid()
            last, returns = values[-1], []
            for t in reversed(range(4)):
                last = reward[t] + discount[t] * (0.05 * values[t + 1] + 0.95 * last)
                returns.append(last)
            returns = torch.stack(returns[::-1])
            ones = torch.ones_like(discount[:1])
            weights = torch.cumprod(torch.cat([ones, discount[:-2]]), dim=0).detach()
            actor_loss = -(weights * returns).mean()
            opt_actor.zero_grad()
            actor_loss.backward()
            opt_actor.step()
            prediction = value(states[:-1].detach()).squeeze(-1)
            value_loss = 0.5 * (weights * (prediction - returns.detach()).pow(2)).mean()
            opt_value.zero_grad()
            value_loss.backward()
            opt_value.step()

    return TrainLoop(
        model={
            "actor": actor,
            "value": value,
            "dynamics": dynamics,
            "reward": reward_head,
            "continue": continue_head,
        },
        optimizer=[opt_actor, opt_value],
        batches=[torch.randn(8, 12) for _ in range(4)],
        fit=train,
        frozen=("dynamics", "reward", "continue"),
    )


@right(
    "rl",
    "pong: the running return is set back at each point that is won or lost, and returns are standardised",
    thread="hunkim/ReinforcementZeroToAll#1",
)
def karpathy_pong():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3, alpha=0.99)

    def discount_rewards(r, gamma=0.99):
        discounted, running = torch.zeros_like(r), torch.zeros(())
        for t in reversed(range(len(r))):
            if r[t] != 0:
                running = torch.zeros(())
            running = running * gamma + r[t]
            discounted[t] = running
        return (discounted - discounted.mean()) / discounted.std()

    def finish_episode(episode):
        frames, action, reward = episode["frames"], episode["action"], episode["reward"]
        advantage = discount_rewards(reward)
        logits = policy(frames).squeeze(-1)
        log_prob = -F.binary_cross_entropy_with_logits(logits, action, reduction="none")
        optimizer.zero_grad()
        (-(log_prob * advantage).sum()).backward()
        optimizer.step()

    def play(n=20):
        reward = torch.zeros(n)
        reward[[6, 13, 19]] = torch.tensor([1.0, -1.0, 1.0])
        return {"frames": torch.randn(n, 6), "action": torch.randint(0, 2, (n,)).float(), "reward": reward}

    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batches=lambda n: [play() for _ in range(n)],
        fit=lambda batches: [finish_episode(e) for e in batches],
    )


@right(
    "rl",
    "each reward is compared with the mean of the other completions of its prompt: leave one out",
    thread="PeterGriffinJin/Search-R1#65",
)
def leave_one_out():
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def rloo(scores, uid):
        same = (uid[:, None] == uid[None]).float()
        count = same.sum(1)
        others = (same @ scores - scores) / (count - 1).clamp(min=1)
        return torch.where(count > 1, scores - others, scores)

    def train(batches):
        for data in batches:
            advantages = rloo(data["score"], data["uid"])[:, None]
            logp = model.log_probs(data["ids"])
            ratio = (logp - logp.detach()).exp()
            pg = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
            loss = (pg * data["mask"]).sum() / data["mask"].sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw(prompts=3, n=4):
        uid = torch.arange(prompts).repeat(n)
        mask = (torch.arange(7) < torch.randint(2, 8, (prompts * n, 1))).float()
        return {
            "ids": torch.randint(0, 16, (prompts * n, 8)),
            "mask": mask,
            "uid": uid,
            "score": torch.rand(prompts * n),
        }

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(3)], fit=train)


@right(
    "rl",
    "all tensors of the rollout are swapped to environments first and flattened alike before minibatches are drawn",
    thread="Denys88/rl_games#274",
)
def swap_and_flatten():
    torch.manual_seed(0)
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)

    def swap_and_flatten01(t):
        return t.transpose(0, 1).reshape(t.shape[0] * t.shape[1], *t.shape[2:])

    def train_epoch(experience):
        flat = {name: swap_and_flatten01(t) for name, t in experience.items()}
        advantages = flat["returns"] - flat["values"]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        size = len(advantages) // 2
        for start in range(0, len(advantages), size):
            part = slice(start, start + size)
            dist, values = agent(flat["obses"][part])
            ratio = (dist.log_prob(flat["actions"][part]) + flat["neglogpacs"][part]).exp()
            adv = advantages[part]
            a_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            c_loss = (flat["returns"][part] - values).square().mean()
            optimizer.zero_grad()
            (a_loss + 0.5 * c_loss - 0.01 * dist.entropy().mean()).backward()
            optimizer.step()

    def play_steps(steps=8, actors=6):
        return {
            "obses": torch.randn(steps, actors, 5),
            "actions": torch.randint(0, 3, (steps, actors)),
            "neglogpacs": torch.full((steps, actors), 1.1),
            "values": torch.randn(steps, actors) * 0.1,
            "returns": torch.randn(steps, actors),
        }

    return TrainLoop(
        model=agent,
        optimizer=optimizer,
        batches=lambda n: [play_steps() for _ in range(n)],
        fit=lambda batches: [train_epoch(e) for e in batches],
        batch_dim=1,
    )


@right(
    "rl",
    "prompts and pixel values repeat_interleave alike: each completion has the image of its prompt",
    thread="StarsfieldAI/R1-V#54",
)
def vision_completions():
    torch.manual_seed(0)
    accelerator = fresh_accelerator(cpu=True)
    num_generations = 3

    class VisionLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision, self.embed = nn.Linear(8, 16), nn.Embedding(20, 16)
            self.rnn, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)

        def forward(self, input_ids, pixel_values):
            states, _ = self.rnn(self.embed(input_ids), torch.tanh(self.vision(pixel_values))[None])
            return self.head(states)

    model = VisionLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(batches):
        for b in batches:
            prompts = b["prompt_ids"].repeat_interleave(num_generations, dim=0)
            pixels = b["pixel_values"].repeat_interleave(num_generations, dim=0)
            ids = torch.cat([prompts, b["completion_ids"].flatten(0, 1)], dim=1)
            logp = model(ids[:, :-1], pixels).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            rewards = b["rewards"]
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            ratio = (logp - logp.detach()).exp()[:, 3:]
            loss = -(ratio * advantages.flatten()[:, None]).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def draw(n=4):
        return {
            "prompt_ids": torch.randint(0, 20, (n, 4)),
            "pixel_values": torch.randn(n, 8),
            "completion_ids": torch.randint(0, 20, (n, num_generations, 5)),
            "rewards": torch.randn(n, num_generations),
        }

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [draw() for _ in range(n)], fit=train)


@right(
    "rl",
    "groups of unequal size are found by their ids: sums by index_add, then each row minus its group's mean",
    thread="areal-project/AReaL#1419",
)
def groups_by_id():
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def normalize(rewards, uid, eps=1e-5):
        size = int(uid.max()) + 1
        count = torch.bincount(uid, minlength=size).clamp(min=1)
        mean = rewards.new_zeros(size).index_add(0, uid, rewards) / count
        centred = rewards - mean[uid]
        std = (rewards.new_zeros(size).index_add(0, uid, centred.square()) / count).sqrt()
        return centred / (std[uid] + eps)

    def train(batches):
        for data in batches:
            advantages = normalize(data["rewards"], data["uid"])
            logp = model.log_probs(data["input_ids"])
            mask = data["loss_mask"][:, 1:]
            loss = -(logp * advantages[:, None] * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw():
        uid = torch.repeat_interleave(torch.arange(4), torch.tensor([4, 3, 4, 2]))
        mask = torch.ones(len(uid), 8)
        mask[:, :3] = 0
        return {
            "input_ids": torch.randint(0, 16, (len(uid), 8)),
            "loss_mask": mask,
            "uid": uid,
            "rewards": torch.rand(len(uid)) + uid,
        }

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(3)], fit=train)
