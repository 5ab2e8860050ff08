"""Value and policy losses."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def mlp(*sizes, act=nn.Tanh):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Transition(NamedTuple):
    state: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    next_state: torch.Tensor
    done: torch.Tensor


def replay(n, rows=12, dim=6, actions=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        s = torch.randn(rows, dim, generator=g)
        a = torch.randint(actions, (rows, 1), generator=g)
        nxt = s + 0.3 * torch.randn(rows, dim, generator=g)
        r = s[:, :1] * (a == 0) - s[:, 1:2] * (a == 1)
        d = (torch.rand(rows, 1, generator=g) < 0.25).float()
        out.append(Transition(s, a, r, nxt, d))
    return out


@fault(
    "rl",
    "the target bootstraps through terminal states: batch.done is read nowhere",
    thread="seungeunrho/minimalRL#32",
    check="loss_formula",
)
def dqn():
    q = mlp(6, 32, 3, act=nn.ReLU)
    q_target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    gamma = 0.98

    def train(batches):
        for i, batch in enumerate(batches):
            q_a = q(batch.state).gather(1, batch.action)
            max_q_prime = q_target(batch.next_state).max(1)[0].unsqueeze(1)
            target = batch.reward + gamma * max_q_prime
            loss = F.smooth_l1_loss(q_a, target.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 10 == 9:
                q_target.load_state_dict(q.state_dict())

    return TrainLoop(model=q, optimizer=optimizer, batches=replay, fit=train)


def continuous(n, rows=10, seed=1):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        obs = torch.randn(rows, 5, generator=g)
        act = torch.rand(rows, 3, generator=g) * 2 - 1
        out.append(
            {
                "obs": obs,
                "act": act,
                "rew": (obs[:, :3] * act).sum(1),
                "obs_next": obs + 0.1 * torch.randn(rows, 5, generator=g),
                "done": (torch.rand(rows, generator=g) < 0.1).float(),
            }
        )
    return out


class SACPolicy:
    def __init__(self):
        self.actor = mlp(5, 32, 6, act=nn.ReLU)
        self.critic = mlp(8, 32, 1, act=nn.ReLU)
        self.critic_old = copy.deepcopy(self.critic)
        self.actor_optim = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optim = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.alpha, self.gamma, self.tau = 0.2, 0.99, 0.005

    def sample(self, obs):
        mu, log_std = self.actor(obs).chunk(2, dim=-1)
        dist = Normal(mu, log_std.clamp(-5, 2).exp())
        x = dist.rsample()
        y = torch.tanh(x)
        log_prob = dist.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)
        return y, log_prob

    def learn(self, batch):
        with torch.no_grad():
            a_next, logp_next = self.sample(batch["obs_next"])
            q_next = self.critic_old(torch.cat([batch["obs_next"], a_next], -1))
            q_next = q_next - self.alpha * logp_next
            rew, done = batch["rew"].unsqueeze(1), batch["done"].unsqueeze(1)
            target = rew + self.gamma * (1 - done) * q_next
        current = self.critic(torch.cat([batch["obs"], batch["act"]], -1))
        critic_loss = F.mse_loss(current, target)
        self.critic_optim.zero_grad()
        critic_loss.backward()
        self.critic_optim.step()

        a, logp = self.sample(batch["obs"])
        q = self.critic(torch.cat([batch["obs"], a], -1))
        actor_loss = (self.alpha * logp - q).mean()
        self.actor_optim.zero_grad()
        actor_loss.backward()
        self.actor_optim.step()
        for p, tp in zip(self.critic.parameters(), self.critic_old.parameters(), strict=True):
            tp.data.mul_(1 - self.tau).add_(self.tau * p.data)


@fault(
    "rl",
    "log_prob is not summed over the action's dimensions: the critic's target is (N, 3) against its (N, 1) output",
    thread="thu-ml/tianshou#40",
    check="loss_contract",
)
def soft_actor_critic():
    policy = SACPolicy()
    return TrainLoop(
        model={"actor": policy.actor, "critic": policy.critic, "critic_old": policy.critic_old},
        optimizer=[policy.actor_optim, policy.critic_optim],
        batches=continuous,
        fit=lambda batches: [policy.learn(b) for b in batches],
    )


class ActorCritic(nn.Module):
    def __init__(self, dim=6, actions=4, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, width), nn.Tanh())
        self.pi = nn.Linear(width, actions)
        self.v = nn.Linear(width, 1)
        nn.init.orthogonal_(self.pi.weight, 0.01)

    def forward(self, obs):
        h = self.body(obs)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def rollouts(n, rows=16, dim=6, actions=4, seed=2):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        obs = torch.randn(rows, dim, generator=g)
        act = torch.randint(actions, (rows,), generator=g)
        adv = torch.where(act == obs[:, :actions].argmax(1), 1.0, -0.4) + 0.2 * torch.randn(rows, generator=g)
        val = 0.1 * torch.randn(rows, generator=g)
        out.append(
            {
                "obs": obs,
                "act": act,
                "logp": torch.full((rows,), -1.386) + 0.05 * torch.randn(rows, generator=g),
                "adv": adv,
                "val": val,
                "ret": adv + val,
            }
        )
    return out


@dataclass
class PPOConfig:
    clip: float = 0.2
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    lr: float = 3e-4
    epochs: int = 3


@fault(
    "rl",
    "the minimum is taken of the ratios before they meet the advantages, so negative advantages are "
    "clipped on the wrong side",
    thread="takuseno/ppo#3",
    check="loss_formula",
)
def ppo_update():
    cfg = PPOConfig()
    net = ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg.lr)

    def surrogate_loss(logp, old_logp, adv):
        ratio = torch.exp(logp - old_logp)
        clipped = torch.clamp(ratio, 1 - cfg.clip, 1 + cfg.clip)
        return -(torch.min(ratio, clipped) * adv).mean()

    def update(batches):
        for b in batches:
            for _ in range(cfg.epochs):
                dist, value = net(b["obs"])
                loss = surrogate_loss(dist.log_prob(b["act"]), b["logp"], b["adv"])
                loss = loss + cfg.vf_coef * F.mse_loss(value, b["ret"]) - cfg.ent_coef * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batches=rollouts, fit=update)


@fault(
    "rl",
    "ent_coef * entropy is added to the minimised loss, so the entropy is minimised",
    thread="openai/universe-starter-agent#110",
    check="loss_formula",
)
def a2c():
    cfg = SimpleNamespace(vf_coef=0.5, ent_coef=0.01)
    net = ActorCritic()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=7e-4, eps=1e-5)

    def compute_loss(b):
        dist, value = net(b["obs"])
        advantage = (b["ret"] - value).detach()
        policy_loss = -(advantage * dist.log_prob(b["act"])).mean()
        value_loss = (b["ret"] - value).pow(2).mean()
        entropy_loss = dist.entropy().mean()
        return policy_loss + cfg.vf_coef * value_loss + cfg.ent_coef * entropy_loss

    def train(batches):
        for b in batches:
            optimizer.zero_grad()
            compute_loss(b).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batches=rollouts, fit=train)


def episodes(n, steps=12, dim=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        obs = torch.randn(steps, dim, generator=g)
        act = torch.randint(2, (steps,), generator=g)
        out.append({"obs": obs, "act": act, "rewards": (act == (obs[:, 0] > 0)).float()})
    return out


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 48)
        self.action_head = nn.Linear(48, 2)
        self.value_head = nn.Linear(48, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


@fault(
    "rl",
    "the advantage in the policy's loss keeps the graph of the value head, which is moved by log_prob * value",
    thread="astariul/encode-attend-navigate-pytorch#2",
    check="loss_formula",
)
def finish_episode():
    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    eps = torch.finfo(torch.float32).eps

    def run(episode):
        R, returns = 0.0, []
        for r in reversed(episode["rewards"].tolist()):
            R = r + 0.99 * R
            returns.insert(0, R)
        returns = torch.tensor(returns)
        if len(returns) > 1:
            returns = (returns - returns.mean()) / (returns.std() + eps)
        probs, state_values = model(episode["obs"])
        log_probs = Categorical(probs).log_prob(episode["act"])
        policy_losses, value_losses = [], []
        for log_prob, value, R in zip(log_probs, state_values, returns, strict=True):
            advantage = R - value.squeeze()
            policy_losses.append(-log_prob * advantage)
            value_losses.append(F.smooth_l1_loss(value, R.view(1)))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=episodes, fit=lambda batches: [run(e) for e in batches])


@fault(
    "rl",
    "values are collected with .item(), so v_loss has no graph and the value head is never trained",
    thread="jsboige/CoursIA#15256",
    check="gradient_reaches_every_param",
)
def train_gae():
    net = ActorCritic(dim=4, actions=2, width=24)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def rollout(episode):
        log_probs, values, entropies = [], [], []
        for obs, act in zip(episode["obs"], episode["act"], strict=True):
            dist, value = net(obs.unsqueeze(0))
            log_probs.append(dist.log_prob(act.view(1)))
            values.append(value.item())
            entropies.append(dist.entropy())
        return torch.cat(log_probs), values, torch.cat(entropies)

    def gae(rewards, values, gamma=0.99, lam=0.95):
        adv, last = [0.0] * len(rewards), 0.0
        for t in reversed(range(len(rewards))):
            nxt = values[t + 1] if t + 1 < len(values) else 0.0
            last = rewards[t] + gamma * nxt - values[t] + gamma * lam * last
            adv[t] = last
        return torch.tensor(adv)

    def fit(batches):
        for episode in batches:
            log_probs, values, entropies = rollout(episode)
            adv = gae(episode["rewards"].tolist(), values)
            values_t = torch.tensor(values)
            returns = adv + values_t
            adv = (adv - adv.mean()) / (adv.std(unbiased=False) + 1e-8)
            p_loss = -(log_probs * adv).mean()
            v_loss = F.mse_loss(values_t, returns)
            loss = p_loss + 0.5 * v_loss - 0.01 * entropies.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batches=episodes, fit=fit)


@fault(
    "rl",
    "self.target_net = self.policy_net is the same module, so the target moves with every step of the policy net",
    thread="datawhalechina/easy-rl#140",
    check="weights_are_read",
)
def dqn_agent():
    class Agent:
        def __init__(self, gamma=0.9, tau=0.01):
            self.policy_net = mlp(6, 24, 3, act=nn.ReLU)
            self.target_net = self.policy_net
            self.target_net.load_state_dict(self.policy_net.state_dict())
            self.optimizer = torch.optim.AdamW(self.policy_net.parameters(), lr=1e-3, amsgrad=True)
            self.gamma, self.tau = gamma, tau

        def optimize_model(self, batch):
            values = self.policy_net(batch.state).gather(1, batch.action)
            with torch.no_grad():
                nxt = self.target_net(batch.next_state).max(1, keepdim=True).values
            expected = batch.reward + self.gamma * nxt * (1 - batch.done)
            loss = nn.SmoothL1Loss()(values, expected)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(self.policy_net.parameters(), 100)
            self.optimizer.step()
            target, policy = self.target_net.state_dict(), self.policy_net.state_dict()
            for key in policy:
                target[key] = policy[key] * self.tau + target[key] * (1 - self.tau)
            self.target_net.load_state_dict(target)

    agent = Agent()
    return TrainLoop(
        model=agent.policy_net,
        optimizer=agent.optimizer,
        batches=replay,
        fit=lambda batches: [agent.optimize_model(b) for b in batches],
    )


@fault(
    "rl",
    "tau of shape (n,) is broadcast along the axis of the target's quantiles and not along that of the predicted ones",
    thread="BY571/QR-DQN#1",
    check="loss_formula",
)
def quantile_dqn():
    n_quantiles, n_actions = 8, 3

    class QuantileNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(6, 32, n_actions * n_quantiles, act=nn.ReLU)

        def forward(self, obs):
            return self.net(obs).view(-1, n_actions, n_quantiles)

    def quantile_huber_loss(current, target, kappa=1.0):
        tau = (torch.arange(n_quantiles) + 0.5) / n_quantiles
        pairwise = target.unsqueeze(1) - current.unsqueeze(2)
        abs_delta = pairwise.abs()
        huber = torch.where(abs_delta > kappa, kappa * (abs_delta - 0.5 * kappa), 0.5 * pairwise**2)
        return ((tau - (pairwise.detach() < 0).float()).abs() * huber).sum(1).mean()

    online, target_net = QuantileNetwork(), QuantileNetwork()
    target_net.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-4)

    def train(batches):
        for i, b in enumerate(batches):
            with torch.no_grad():
                nxt = target_net(b.next_state)
                best = nxt.mean(2).argmax(1)
                nxt = nxt[torch.arange(len(best)), best]
                target = b.reward + (1 - b.done) * 0.95 * nxt
            current = online(b.state)[torch.arange(len(best)), b.action.squeeze(1)]
            loss = quantile_huber_loss(current, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 10 == 9:
                target_net.load_state_dict(online.state_dict())

    return TrainLoop(model={"online": online, "target": target_net}, optimizer=optimizer, batches=replay, fit=train)
