"""Agents: policies, critics, replay."""

# ruff: noqa: N801, N805
from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import keeps

STATE, ACTIONS = 6, 3


def rollouts(n, rows=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "obs": torch.randn(rows, STATE, generator=generator),
            "actions": torch.randint(0, ACTIONS, (rows,), generator=generator),
            "logprobs": -1.0 - 0.3 * torch.rand(rows, generator=generator),
            "advantages": torch.randn(rows, generator=generator),
            "returns": torch.randn(rows, generator=generator),
            "values": torch.randn(rows, generator=generator),
        }
        for _ in range(n)
    ]


def transitions(n, rows=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, STATE, generator=generator),
            torch.randint(0, ACTIONS, (rows, 1), generator=generator),
            torch.randn(rows, 1, generator=generator),
            torch.randn(rows, STATE, generator=generator),
            (torch.rand(rows, 1, generator=generator) < 0.2).float(),
        )
        for _ in range(n)
    ]


def layer_init(layer, std=2**0.5, bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(STATE, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), std=1.0))
        self.actor = nn.Sequential(
            layer_init(nn.Linear(STATE, 16)), nn.Tanh(), layer_init(nn.Linear(16, ACTIONS), std=0.01)
        )


@keeps(
    "rl",
    "the update of PPO is a method of an algorithm class, with the distribution and the clipping written otherwise",
    thread="vwxyzjn/cleanrl#108",
)
class ppo_update:
    def before():
        agent = Agent()
        optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)

        def fit(batches):
            for b in batches:
                dist = Categorical(logits=agent.actor(b["obs"]))
                newvalue = agent.critic(b["obs"]).view(-1)
                logratio = dist.log_prob(b["actions"]) - b["logprobs"]
                ratio = logratio.exp()
                adv = (b["advantages"] - b["advantages"].mean()) / (b["advantages"].std() + 1e-8)
                pg_loss1 = -adv * ratio
                pg_loss2 = -adv * torch.clamp(ratio, 0.8, 1.2)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                v_unclipped = (newvalue - b["returns"]) ** 2
                v_clipped = b["values"] + torch.clamp(newvalue - b["values"], -0.2, 0.2)
                v_loss = 0.5 * torch.max(v_unclipped, (v_clipped - b["returns"]) ** 2).mean()
                loss = pg_loss - 0.01 * dist.entropy().mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()

        return TrainLoop(model=agent, optimizer=optimizer, batches=rollouts, fit=fit)

    def after():
        @dataclass
        class PPOConfig:
            lr: float = 3e-3
            clip: float = 0.2
            ent_coef: float = 0.01
            vf_coef: float = 0.5
            max_norm: float = 0.5

        class PPO:
            def __init__(self, config):
                self.config = config
                self.agent = Agent()
                self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=config.lr, eps=1e-5)

            def evaluate_actions(self, obs, actions):
                logits = self.agent.actor(obs)
                values = self.agent.critic(obs).squeeze(-1)
                logp = logits.log_softmax(-1)
                entropy = -(logp.exp() * logp).sum(-1)
                return logp.gather(1, actions[:, None]).squeeze(1), entropy, values

            def losses(self, obs, actions, logprobs, advantages, returns, values):
                clip = self.config.clip
                logp, entropy, predicted = self.evaluate_actions(obs, actions)
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                ratio = torch.exp(logp - logprobs)
                policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
                clipped = values + (predicted - values).clamp(-clip, clip)
                errors = torch.stack([predicted - returns, clipped - returns]).square()
                value = errors.amax(0).mean() / 2
                return policy + self.config.vf_coef * value - self.config.ent_coef * entropy.mean()

            def update(self, rollout):
                loss = self.losses(**rollout)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), self.config.max_norm)
                self.optimizer.step()

            def learn(self, batches):
                for rollout in batches:
                    self.update(rollout)

        ppo = PPO(PPOConfig())
        return TrainLoop(model=ppo.agent, optimizer=ppo.optimizer, batches=rollouts, fit=ppo.learn)


def q_network():
    return nn.Sequential(nn.Linear(STATE, 24), nn.ReLU(), nn.Linear(24, ACTIONS))


@keeps(
    "rl",
    "the slow copy of the network is updated in one call for all weights in place of one line each",
    thread="DLR-RM/stable-baselines3#131",
)
class slow_copy:
    def _loop(update):
        q_net = q_network()
        target = copy.deepcopy(q_net).requires_grad_(False)
        optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-2)

        def fit(batches):
            for obs, action, reward, following, done in batches:
                with torch.no_grad():
                    best = target(following).max(1, keepdim=True).values
                    expected = reward + 0.99 * (1 - done) * best
                loss = F.smooth_l1_loss(q_net(obs).gather(1, action), expected)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                update(q_net, target, 0.05)

        return TrainLoop(
            model={"q_net": q_net, "target": target},
            optimizer=optimizer,
            batches=transitions,
            fit=fit,
            frozen=("target.",),
        )

    def before():
        def update(q_net, target, tau):
            for p, t in zip(q_net.parameters(), target.parameters(), strict=True):
                t.data.copy_(tau * p.data + (1 - tau) * t.data)

        return slow_copy._loop(update)

    def after():
        @torch.no_grad()
        def polyak_update(q_net, target, tau):
            torch._foreach_mul_(list(target.parameters()), 1 - tau)
            torch._foreach_add_(list(target.parameters()), list(q_net.parameters()), alpha=tau)

        return slow_copy._loop(polyak_update)


@keeps(
    "rl",
    "two critics become entries of a list, with one optimizer over both",
    thread="DLR-RM/stable-baselines3#28",
    renamed={"qf1": "critics.0", "qf2": "critics.1"},
)
class twin_critics:
    class Q(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(STATE + ACTIONS, 16)
            self.fc2 = nn.Linear(16, 1)

        def forward(self, obs, action):
            return self.fc2(F.relu(self.fc1(torch.cat([obs, action], 1))))

    def _target(reward, following, done):
        return reward + 0.99 * (1 - done) * following.mean(1, keepdim=True)

    def before():
        actor = nn.Sequential(nn.Linear(STATE, 16), nn.ReLU(), nn.Linear(16, ACTIONS), nn.Tanh())
        qf1, qf2 = twin_critics.Q(), twin_critics.Q()
        actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
        q_optimizer = torch.optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=5e-3)

        def fit(batches):
            for obs, action, reward, following, done in batches:
                taken = F.one_hot(action.squeeze(1), ACTIONS).to(obs)
                target = twin_critics._target(reward, following, done)
                qf1_loss = F.mse_loss(qf1(obs, taken), target)
                qf2_loss = F.mse_loss(qf2(obs, taken), target)
                q_optimizer.zero_grad()
                (qf1_loss + qf2_loss).backward()
                q_optimizer.step()
                actor_loss = -qf1(obs, actor(obs)).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()

        return TrainLoop(
            model={"actor": actor, "qf1": qf1, "qf2": qf2},
            optimizer=[q_optimizer, actor_optimizer],
            batches=transitions,
            fit=fit,
        )

    def after():
        class TD3:
            def __init__(self):
                self.actor = nn.Sequential(nn.Linear(STATE, 16), nn.ReLU(), nn.Linear(16, ACTIONS), nn.Tanh())
                self.critics = nn.ModuleList(twin_critics.Q() for _ in range(2))
                self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=5e-3)
                self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)

            def critic_step(self, obs, action, target):
                values = torch.cat([critic(obs, action) for critic in self.critics], dim=1)
                loss = (values - target).square().mean(0).sum()
                self.critic_optimizer.zero_grad()
                loss.backward()
                self.critic_optimizer.step()

            def actor_step(self, obs):
                self.critics.requires_grad_(False)
                loss = -self.critics[0](obs, self.actor(obs)).mean()
                self.actor_optimizer.zero_grad()
                loss.backward()
                self.actor_optimizer.step()
                self.critics.requires_grad_(True)

            def train(self, batches):
                for obs, action, reward, following, done in batches:
                    target = twin_critics._target(reward, following, done)
                    self.critic_step(obs, F.one_hot(action[:, 0], num_classes=ACTIONS).to(obs), target)
                    self.actor_step(obs)

        agent = TD3()
        return TrainLoop(
            model={"actor": agent.actor, "critics": agent.critics},
            optimizer=[agent.critic_optimizer, agent.actor_optimizer],
            batches=transitions,
            fit=agent.train,
        )


@keeps(
    "rl",
    "RMSprop is written by hand, as for an optimizer that processes share",
    thread="dgriff777/rl_a3c_pytorch#29",
)
class shared_optimizer:
    def _loop(make):
        model = nn.Sequential(nn.Linear(STATE, 20), nn.ReLU(), nn.Linear(20, ACTIONS + 1))
        optimizer = make(model.parameters(), lr=7e-3, alpha=0.99, eps=1e-5)

        def fit(batches):
            for b in batches:
                logits, value = model(b["obs"]).split([ACTIONS, 1], dim=1)
                dist = Categorical(logits=logits)
                advantage = b["returns"] - value.squeeze(1)
                policy = -(dist.log_prob(b["actions"]) * advantage.detach()).mean()
                loss = policy + 0.5 * advantage.pow(2).mean() - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=rollouts, fit=fit)

    def before():
        return shared_optimizer._loop(torch.optim.RMSprop)

    def after():
        class SharedRMSprop(torch.optim.Optimizer):
            def __init__(self, params, lr=7e-4, alpha=0.99, eps=1e-8):
                super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps})
                for group in self.param_groups:
                    for p in group["params"]:
                        self.state[p]["square_avg"] = None

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is None:
                            continue
                        average = self.state[p]["square_avg"]
                        if average is None:
                            average = torch.zeros_like(p)
                        average = group["alpha"] * average + (1 - group["alpha"]) * p.grad**2
                        self.state[p]["square_avg"] = average
                        p.sub_(group["lr"] * p.grad / (average.sqrt() + group["eps"]))

        return shared_optimizer._loop(SharedRMSprop)


@keeps(
    "rl",
    "the heads of a policy get names, are given to the constructor and share one call of the trunk",
    thread="PufferAI/PufferLib#459",
    renamed={"trunk.0": "policy.encoder.0", "pi": "policy.decoder", "v": "policy.value_head"},
)
class policy_heads:
    def _loop(model, forward):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

        def fit(batches):
            for b in batches:
                logits, value = forward(model, b["obs"])
                policy = F.cross_entropy(logits, b["actions"], reduction="none")
                optimizer.zero_grad()
                ((policy * b["advantages"]).mean() + F.mse_loss(value, b["returns"])).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=rollouts, fit=fit)

    def before():
        class ActorCritic(nn.Module):
            def __init__(self):
                super().__init__()
                self.trunk = nn.Sequential(layer_init(nn.Linear(STATE, 16)), nn.ReLU())
                self.pi = layer_init(nn.Linear(16, ACTIONS), std=0.01)
                self.v = layer_init(nn.Linear(16, 1), std=1.0)

            def policy(self, obs):
                return self.pi(self.trunk(obs))

            def value(self, obs):
                return self.v(self.trunk(obs)).squeeze(-1)

        return policy_heads._loop(ActorCritic(), lambda model, obs: (model.policy(obs), model.value(obs)))

    def after():
        class Policy(nn.Module):
            def __init__(self, encoder, decoder, value_head):
                super().__init__()
                self.value_head = value_head
                self.decoder = decoder
                self.encoder = encoder

            def forward(self, obs):
                hidden = self.encoder(obs)
                return self.decoder(hidden), self.value_head(hidden).flatten()

        class Wrapper(nn.Module):
            def __init__(self):
                super().__init__()
                encoder = nn.Sequential(layer_init(nn.Linear(STATE, 16)), nn.ReLU())
                decoder = layer_init(nn.Linear(16, ACTIONS), std=0.01)
                self.policy = Policy(encoder, decoder, layer_init(nn.Linear(16, 1), std=1.0))

            def forward(self, obs):
                return self.policy(obs)

        return policy_heads._loop(Wrapper(), lambda model, obs: model(obs))
