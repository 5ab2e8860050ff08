"""Agents: policies, critics, replay."""

# ruff: noqa: N801, N805
from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import breaks

STATE, ACTIONS = 5, 3


def rollouts(n, rows=16, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "obs": torch.randn(rows, STATE, generator=generator),
            "actions": torch.randint(0, ACTIONS, (rows,), generator=generator),
            "logprobs": -1.0 - 0.3 * torch.rand(rows, generator=generator),
            "advantages": 0.5 + 2 * torch.randn(rows, generator=generator),
            "returns": torch.randn(rows, generator=generator),
        }
        for _ in range(n)
    ]


def transitions(n, rows=16, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "obs": torch.randn(rows, STATE, generator=generator),
            "action": torch.randint(0, ACTIONS, (rows,), generator=generator),
            "reward": torch.randn(rows, generator=generator),
            "next_obs": torch.randn(rows, STATE, generator=generator),
            "done": (torch.rand(rows, generator=generator) < 0.3).float(),
        }
        for _ in range(n)
    ]


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(layer_init(nn.Linear(STATE, 16)), nn.Tanh())
        self.decoder = nn.Sequential(
            layer_init(nn.Linear(16, 16)), nn.GELU(), layer_init(nn.Linear(16, ACTIONS), std=0.01)
        )
        self.value = layer_init(nn.Linear(16, 1), std=1.0)

    def forward(self, obs):
        hidden = self.encoder(obs)
        return Categorical(logits=self.decoder(hidden)), self.value(hidden).squeeze(-1)


def normalise(advantages):
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def ppo_loss(agent, b, clip=0.2):
    dist, value = agent(b["obs"])
    ratio = (dist.log_prob(b["actions"]) - b["logprobs"]).exp()
    adv = normalise(b["advantages"])
    policy = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()
    return policy + 0.5 * F.mse_loss(value, b["returns"]) - 0.01 * dist.entropy().mean()


def ppo(agent, optimizer, loss_fn=ppo_loss, clip=None):
    def fit(batches):
        for b in batches:
            loss = loss_fn(agent, b)
            optimizer.zero_grad()
            loss.backward()
            if clip is None:
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            else:
                clip()
            optimizer.step()

    return TrainLoop(model=agent, optimizer=optimizer, batches=rollouts, fit=fit)


@breaks(
    "rl",
    "the optimizer's epsilon is left at torch's default",
    first="group",
    place="eps",
    thread="mlpnlp/mlpnlp-nmt#4",
)
class epsilon:
    def before():
        agent = Agent()
        return ppo(agent, torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5))

    def after():
        settings = {"learning_rate": 2.5e-3, "adam_eps": 1e-5}
        agent = Agent()
        return ppo(agent, torch.optim.Adam(agent.parameters(), lr=settings["learning_rate"]))


@breaks(
    "rl",
    "advantages are normalised only where it is asked for, which is not by default",
    first="loss",
    place="",
    thread="pytorch/rl#887",
)
class advantage_scale:
    def before():
        agent = Agent()
        return ppo(agent, torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5))

    def after():
        class ClipPPOLoss:
            def __init__(self, clip_epsilon=0.2, normalize_advantage=False):
                self.clip_epsilon, self.normalize_advantage = clip_epsilon, normalize_advantage

            def __call__(self, agent, b):
                dist, value = agent(b["obs"])
                adv = normalise(b["advantages"]) if self.normalize_advantage else b["advantages"]
                ratio = (dist.log_prob(b["actions"]) - b["logprobs"]).exp()
                clipped = ratio.clamp(1 - self.clip_epsilon, 1 + self.clip_epsilon)
                policy = -torch.min(ratio * adv, clipped * adv).mean()
                return policy + 0.5 * F.mse_loss(value, b["returns"]) - 0.01 * dist.entropy().mean()

        agent = Agent()
        return ppo(agent, torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5), ClipPPOLoss())


@breaks(
    "rl",
    "advantages are normalised between the two sides of the minimum",
    first="loss",
    place="",
    thread="pytorch/rl#1033",
)
class advantage_order:
    def before():
        agent = Agent()
        return ppo(agent, torch.optim.Adam(agent.parameters(), lr=2e-3))

    def after():
        def loss(agent, b, clip=0.2):
            dist, value = agent(b["obs"])
            adv = b["advantages"]
            ratio = (dist.log_prob(b["actions"]) - b["logprobs"]).exp()
            gain1 = ratio * adv
            adv = normalise(adv)
            gain2 = ratio.clamp(1 - clip, 1 + clip) * adv
            policy = -torch.stack([gain1, gain2], -1).min(-1).values.mean()
            return policy + 0.5 * F.mse_loss(value, b["returns"]) - 0.01 * dist.entropy().mean()

        agent = Agent()
        return ppo(agent, torch.optim.Adam(agent.parameters(), lr=2e-3), loss)


@breaks(
    "rl",
    "the gradients of another copy of the agent are clipped",
    first="gradient",
    place="clip_grad_norm_",
    thread="DarylRodrigo/rl_lib#10",
)
class clipped_copy:
    def before():
        agent = Agent()
        return ppo(agent, torch.optim.SGD(agent.parameters(), lr=0.1))

    def after():
        agent = Agent()
        old = copy.deepcopy(agent)

        def clip():
            nn.utils.clip_grad_norm_(old.parameters(), 0.5)

        return ppo(agent, torch.optim.SGD(agent.parameters(), lr=0.1), clip=clip)


@breaks(
    "rl",
    "the wrapper's init takes the last layer of the policy too, which had a smaller one",
    first="weights",
    place="decoder.2.weight",
    thread="PufferAI/PufferLib#459",
)
class wrapper_init:
    def before():
        agent = Agent()
        return ppo(agent, torch.optim.Adam(agent.parameters(), lr=1e-3))

    def after():
        agent = Agent()
        for name, p in agent.named_parameters():
            if "bias" in name:
                nn.init.constant_(p, 0)
            elif name == "decoder.2.weight":
                nn.init.orthogonal_(p, 1.0)
        return ppo(agent, torch.optim.Adam(agent.parameters(), lr=1e-3))


def q_learning(expected, sync=None, obs=lambda x: x):
    q_net = nn.Sequential(nn.Linear(STATE, 24), nn.ReLU(), nn.Linear(24, ACTIONS))
    target = copy.deepcopy(q_net).requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-2)

    def soft(step):
        with torch.no_grad():
            for p, t in zip(q_net.parameters(), target.parameters(), strict=True):
                t.lerp_(p, 0.05)

    def fit(batches):
        for step, b in enumerate(batches, 1):
            with torch.no_grad():
                aim = expected(b, target(b["next_obs"]))
            value = q_net(obs(b["obs"])).gather(1, b["action"][:, None]).squeeze(1)
            optimizer.zero_grad()
            F.mse_loss(value, aim).backward()
            optimizer.step()
            soft(step)
            if sync is not None:
                sync(step, q_net, target)

    return TrainLoop(
        model={"q_net": q_net, "target": target},
        optimizer=optimizer,
        batches=transitions,
        fit=fit,
        frozen=("target.",),
    )


@breaks(
    "rl",
    "the value of the next state counts at the end of an episode too",
    first="loss",
    place="mse_loss",
    thread="seungeunrho/minimalRL#21",
)
class bootstrap:
    def before():
        return q_learning(lambda b, q: b["reward"] + 0.98 * q.max(1).values * (1 - b["done"]))

    def after():
        def td_target(b, q, gamma=0.98):
            best, _ = q.max(dim=1)
            return b["reward"] + gamma * best

        return q_learning(td_target)


@breaks(
    "rl",
    "every third step the slow copy is overwritten, beside its slow update",
    first="update",
    place="target.0.weight",
    thread="anthonytorlucci/rlevo#182",
)
class target_sync:
    def _expected(b, q):
        return b["reward"] + 0.98 * q.max(1).values * (1 - b["done"])

    def before():
        return q_learning(target_sync._expected)

    def after():
        def sync(step, q_net, target, target_update_frequency=3):
            if step % target_update_frequency == 0:
                target.load_state_dict(q_net.state_dict())

        return q_learning(target_sync._expected, sync)


@breaks(
    "rl",
    "frames reach the network as bytes, no longer divided by 255",
    first="output",
    place="network.0",
    thread="vwxyzjn/cleanrl#108",
)
class frame_scale:
    def _frames(n, rows=8, seed=6):
        generator = torch.Generator().manual_seed(seed)
        return [
            {
                "frames": torch.randint(0, 256, (rows, 2, 8, 8), generator=generator).float(),
                "actions": torch.randint(0, ACTIONS, (rows,), generator=generator),
                "returns": torch.randn(rows, generator=generator),
            }
            for _ in range(n)
        ]

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(nn.Conv2d(2, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 12))
            self.heads = nn.Linear(12, ACTIONS + 1)

    def _loop(agent):
        optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)

        def fit(batches):
            for b in batches:
                logits, value = agent(b["frames"]).split([ACTIONS, 1], 1)
                advantage = b["returns"] - value.squeeze(1)
                policy = F.cross_entropy(logits, b["actions"], reduction="none") * advantage.detach()
                optimizer.zero_grad()
                (policy.mean() + 0.5 * advantage.square().mean()).backward()
                optimizer.step()

        return TrainLoop(model=agent, optimizer=optimizer, batches=frame_scale._frames, fit=fit)

    def before():
        class Agent(frame_scale.Agent):
            def forward(self, x):
                return self.heads(F.relu(self.network(x / 255.0)))

        return frame_scale._loop(Agent())

    def after():
        class Agent(frame_scale.Agent):
            def hidden(self, x):
                return self.network(x).relu()

            def forward(self, x):
                return self.heads(self.hidden(x))

        return frame_scale._loop(Agent())


@breaks(
    "rl",
    "the temperature's own loss trains the policy as well, its log-probabilities are no longer detached",
    first="gradient",
    place="actor.0.weight",
    thread="mani-skill/ManiSkill#899",
)
class temperature:
    def _loop(detach):
        actor = nn.Sequential(nn.Linear(STATE, 16), nn.ReLU(), nn.Linear(16, 4))
        log_alpha = nn.ParameterDict({"log_alpha": nn.Parameter(torch.zeros(1))})
        optimizer = torch.optim.Adam([*actor.parameters(), *log_alpha.parameters()], lr=3e-3)

        def fit(batches):
            for b in batches:
                mean, log_std = actor(b["obs"]).chunk(2, dim=-1)
                dist = Normal(mean, log_std.clamp(-5, 2).exp())
                sample = dist.rsample()
                logp = (dist.log_prob(sample) - torch.log(1 - sample.tanh().square() + 1e-6)).sum(-1)
                quality = -(sample.tanh() - b["next_obs"][:, :2]).square().sum(-1)
                alpha = log_alpha["log_alpha"]
                actor_loss = (alpha.exp().detach() * logp - quality).mean()
                alpha_loss = -(alpha.exp() * detach(logp - 2)).mean()
                optimizer.zero_grad()
                (actor_loss + alpha_loss).backward()
                optimizer.step()

        return TrainLoop(
            model={"actor": actor, "temperature": log_alpha}, optimizer=optimizer, batches=transitions, fit=fit
        )

    def before():
        return temperature._loop(torch.Tensor.detach)

    def after():
        return temperature._loop(lambda entropy: entropy)
