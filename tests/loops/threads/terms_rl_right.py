"""Value and policy losses that are right although they look odd."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def continuous(n, rows=10, seed=11):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        obs = torch.randn(rows, 5, generator=g)
        act = torch.rand(rows, 2, generator=g) * 2 - 1
        rew = -(act - obs[:, :2].tanh()).square().sum(1, keepdim=True)
        nxt = obs + 0.1 * torch.randn(rows, 5, generator=g)
        done = (torch.rand(rows, 1, generator=g) < 0.1).float()
        out.append((obs, act, rew, nxt, done))
    return out


@right(
    "rl",
    "alpha's loss multiplies log_alpha and not alpha, and the actor's gradient that reaches the critics "
    "is cleared before their step",
    thread="DLR-RM/stable-baselines3#36",
)
def sac():
    actor = mlp(5, 32, 4)
    q1, q2 = mlp(7, 32, 1), mlp(7, 32, 1)
    t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
    log_alpha = nn.Parameter(torch.zeros(1))
    opt_pi = torch.optim.Adam(actor.parameters(), lr=3e-4)
    opt_q = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
    opt_a = torch.optim.Adam([log_alpha], lr=1e-3)
    target_entropy = -2.0

    def policy(obs):
        mu, log_std = actor(obs).chunk(2, -1)
        dist = Normal(mu, log_std.clamp(-4, 1).exp())
        u = dist.rsample()
        logp = dist.log_prob(u).sum(-1, keepdim=True)
        logp = logp - (2 * (0.6931 - u - F.softplus(-2 * u))).sum(-1, keepdim=True)
        return u.tanh(), logp

    def update(obs, act, rew, nxt, done):
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            a2, lp2 = policy(nxt)
            sa2 = torch.cat([nxt, a2], -1)
            y = rew + 0.99 * (1 - done) * (torch.min(t1(sa2), t2(sa2)) - alpha * lp2)
        sa = torch.cat([obs, act], -1)
        q_loss = 0.5 * (F.mse_loss(q1(sa), y) + F.mse_loss(q2(sa), y))
        opt_q.zero_grad()
        q_loss.backward()
        opt_q.step()

        pi, lp = policy(obs)
        sp = torch.cat([obs, pi], -1)
        pi_loss = (alpha * lp - torch.min(q1(sp), q2(sp))).mean()
        opt_pi.zero_grad()
        pi_loss.backward()
        opt_pi.step()

        a_loss = -(log_alpha * (lp + target_entropy).detach()).mean()
        opt_a.zero_grad()
        a_loss.backward()
        opt_a.step()
        with torch.no_grad():
            for p, tp in zip([*q1.parameters(), *q2.parameters()], [*t1.parameters(), *t2.parameters()], strict=True):
                tp.lerp_(p, 0.01)

    return TrainLoop(
        model={"actor": actor, "q1": q1, "q2": q2, "t1": t1, "t2": t2},
        optimizer=[opt_pi, opt_q, opt_a],
        batches=continuous,
        fit=lambda batches: [update(*b) for b in batches],
    )
