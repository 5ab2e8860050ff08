"""Value and policy losses that are right although they look odd."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import right


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def transitions(n, rows=12, seed=10):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        obs = torch.randn(rows, 6, generator=g)
        act = torch.randint(3, (rows,), generator=g)
        rew = torch.where(act == obs[:, :3].argmax(1), 1.0, 0.0)
        out.append(
            {
                "obs": obs,
                "act": act,
                "rew": rew,
                "next": obs + 0.2 * torch.randn(rows, 6, generator=g),
                "done": torch.rand(rows, generator=g) < 0.2,
            }
        )
    return out


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
    "double DQN: the online net chooses the action without a gradient, the target net values it",
    thread="DLR-RM/stable-baselines3#487",
)
def double_dqn():
    class DuelingNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(6, 24, 24)
            self.value = nn.Linear(24, 1)
            self.advantage = nn.Linear(24, 3)

        def forward(self, x):
            h = self.body(x).relu()
            adv = self.advantage(h)
            return self.value(h) + adv - adv.mean(dim=1, keepdim=True)

    net = DuelingNet()
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def train(batches):
        for i, b in enumerate(batches):
            with torch.no_grad():
                best = net(b["next"]).argmax(1, keepdim=True)
                boot = target(b["next"]).gather(1, best).squeeze(1)
                y = b["rew"] + 0.97 * boot.masked_fill(b["done"], 0.0)
            q = net(b["obs"]).gather(1, b["act"].unsqueeze(1)).squeeze(1)
            loss = F.smooth_l1_loss(q, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (i + 1) % 8 == 0:
                target.load_state_dict(net.state_dict())

    return TrainLoop(model={"net": net, "target": target}, optimizer=optimizer, batches=transitions, fit=train)


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


class ActorCritic(nn.Module):
    def __init__(self, dim=6, actions=4):
        super().__init__()
        self.pi = mlp(dim, 24, actions, act=nn.Tanh)
        self.v = mlp(dim, 24, 1, act=nn.Tanh)

    def get_value(self, x):
        return self.v(x)

    def evaluate(self, x, action):
        dist = Categorical(logits=self.pi(x))
        return dist.log_prob(action), dist.entropy(), self.v(x)


def rollouts(n, rows=16, seed=12):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        obs = torch.randn(rows, 6, generator=g)
        act = torch.randint(4, (rows,), generator=g)
        adv = (act == obs[:, :4].argmax(1)).float() * 1.5 - 0.4 + 0.1 * torch.randn(rows, generator=g)
        val = 0.1 * torch.randn(rows, generator=g)
        out.append(
            SimpleNamespace(
                obs=obs, act=act, logp=torch.full((rows,), -1.386), adv=adv, val=val, ret=adv + val
            ).__dict__
        )
    return out


@right(
    "rl", "the maximum of two negated surrogates and the maximum of two value losses", thread="openai/baselines#1156"
)
def ppo_clipped_value():
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    clip_coef, ent_coef, vf_coef = 0.2, 0.01, 0.5

    def learn(batches, update_epochs=2):
        for b in batches:
            adv = b["adv"]
            if len(adv) > 1:
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            for _ in range(update_epochs):
                newlogprob, entropy, newvalue = agent.evaluate(b["obs"], b["act"])
                ratio = (newlogprob - b["logp"]).exp()
                pg_loss1 = -adv * ratio
                pg_loss2 = -adv * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                newvalue = newvalue.view(-1)
                v_loss_unclipped = (newvalue - b["ret"]) ** 2
                v_clipped = b["val"] + torch.clamp(newvalue - b["val"], -clip_coef, clip_coef)
                v_loss_clipped = (v_clipped - b["ret"]) ** 2
                v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()
                loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()

    return TrainLoop(model=agent, optimizer=optimizer, batches=rollouts, fit=learn)


@right("rl", "entropy_loss is the negative entropy and is added", thread="greydanus/baby-a3c#5")
def a3c():
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)

    def cost_func(values, logits, actions, returns):
        logps = F.log_softmax(logits, dim=-1)
        taken = logps.gather(1, actions.view(-1, 1)).view(-1)
        policy_loss = -(taken * (returns - values.detach())).sum()
        value_loss = 0.5 * (returns - values).pow(2).sum()
        entropy_loss = -(-logps * torch.exp(logps)).sum()
        return policy_loss + 0.5 * value_loss + 0.01 * entropy_loss

    def train(batches):
        for b in batches:
            loss = cost_func(agent.v(b["obs"]).view(-1), agent.pi(b["obs"]), b["act"], b["ret"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 40)
            optimizer.step()

    return TrainLoop(model=agent, optimizer=optimizer, batches=rollouts, fit=train)


def padded_episodes(n, rows=6, steps=9, seed=13):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        lengths = torch.randint(3, steps + 1, (rows,), generator=g)
        lengths[0] = steps - 1
        mask = torch.arange(steps)[None] < lengths[:, None]
        obs = torch.randn(rows, steps, 4, generator=g) * mask[..., None]
        act = torch.randint(2, (rows, steps), generator=g) * mask
        rew = (act == (obs[..., 0] > 0)).float() * mask
        out.append({"obs": obs, "act": act, "rew": rew, "mask": mask})
    return out


@right(
    "rl",
    "reward-to-go summed over the steps of an episode, with a baseline that is the mean of the batch's returns",
    thread="openai/spinningup#59",
)
def reinforce_to_go():
    policy = mlp(4, 32, 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def rewards_to_go(rew):
        return rew.flip(1).cumsum(1).flip(1)

    def train(batches):
        for b in batches:
            rtg, mask = rewards_to_go(b["rew"]), b["mask"].float()
            baseline = (rtg * mask).sum() / mask.sum()
            logp = Categorical(logits=policy(b["obs"])).log_prob(b["act"])
            loss = -(logp * (rtg - baseline) * mask).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batches=padded_episodes,
        fit=train,
    )


@right(
    "rl",
    "the actor is trained by -Q1 only, every second update; exploration noise is on the target's action",
    thread="DLR-RM/stable-baselines3#1112",
)
def td3():
    class TD3:
        def __init__(self, policy_freq=2):
            self.actor = nn.Sequential(mlp(5, 24, 2), nn.Tanh())
            self.critic1, self.critic2 = mlp(7, 24, 1), mlp(7, 24, 1)
            self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critic1, self.critic2]))
            self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
            self.critic_optimizer = torch.optim.Adam([*self.critic1.parameters(), *self.critic2.parameters()], lr=3e-4)
            self.total_it, self.policy_freq = 0, policy_freq

        def train(self, state, action, reward, next_state, done):
            self.total_it += 1
            actor_t, c1_t, c2_t = self.targets
            with torch.no_grad():
                noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
                next_action = (actor_t(next_state) + noise).clamp(-1, 1)
                sa = torch.cat([next_state, next_action], 1)
                target_q = reward + (1 - done) * 0.99 * torch.min(c1_t(sa), c2_t(sa))
            sa = torch.cat([state, action], 1)
            critic_loss = F.mse_loss(self.critic1(sa), target_q) + F.mse_loss(self.critic2(sa), target_q)
            self.critic_optimizer.zero_grad()
            critic_loss.backward()
            self.critic_optimizer.step()
            if self.total_it % self.policy_freq == 0:
                actor_loss = -self.critic1(torch.cat([state, self.actor(state)], 1)).mean()
                self.actor_optimizer.zero_grad()
                actor_loss.backward()
                self.actor_optimizer.step()
                live = nn.ModuleList([self.actor, self.critic1, self.critic2])
                for p, t in zip(live.parameters(), self.targets.parameters(), strict=True):
                    t.data.copy_(0.005 * p.data + 0.995 * t.data)

    agent = TD3()
    return TrainLoop(
        model={"actor": agent.actor, "critic1": agent.critic1, "critic2": agent.critic2, "targets": agent.targets},
        optimizer=[agent.actor_optimizer, agent.critic_optimizer],
        batches=continuous,
        fit=lambda batches: [agent.train(*b) for b in batches],
    )


@right(
    "rl",
    "expectile regression: the weight |tau - 1(u < 0)| is asymmetric, and exp(beta * advantage) is a constant weight",
    thread="senya-ashukha/quantile-regression-dqn-pytorch#2",
)
def implicit_q_learning():
    value, critic, actor = mlp(5, 24, 1), mlp(7, 24, 1), mlp(5, 24, 2)
    critic_target = copy.deepcopy(critic)
    opts = {n: torch.optim.Adam(m.parameters(), lr=1e-3) for n, m in (("v", value), ("q", critic), ("pi", actor))}

    def asymmetric_l2_loss(u, tau=0.7):
        return torch.mean(torch.abs(tau - (u < 0).float()) * u**2)

    def step(name, loss):
        opts[name].zero_grad()
        loss.backward()
        opts[name].step()

    def train(batches):
        for obs, act, rew, nxt, done in batches:
            sa = torch.cat([obs, act], 1)
            with torch.no_grad():
                q = critic_target(sa)
                next_v = value(nxt)
            adv = q - value(obs)
            step("v", asymmetric_l2_loss(adv))
            step("q", F.mse_loss(critic(sa), rew + 0.99 * (1 - done) * next_v))
            weight = torch.exp(3.0 * adv.detach()).clamp(max=100.0)
            bc = (actor(obs).tanh() - act).square().sum(1, keepdim=True)
            step("pi", (weight * bc).mean())
            for p, t in zip(critic.parameters(), critic_target.parameters(), strict=True):
                t.data.lerp_(p.data, 0.01)

    return TrainLoop(
        model={"value": value, "critic": critic, "actor": actor, "critic_target": critic_target},
        optimizer=list(opts.values()),
        batches=continuous,
        fit=train,
    )


@right(
    "rl",
    "C51: a cross-entropy against a projected distribution that shares mass between two atoms",
    thread="floringogianu/categorical-dqn#1",
)
def categorical_dqn():
    atoms, v_min, v_max, gamma = 11, -1.0, 3.0, 0.9
    support = torch.linspace(v_min, v_max, atoms)
    delta = (v_max - v_min) / (atoms - 1)
    net = mlp(6, 32, 3 * atoms)
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def project(b):
        rows = len(b["rew"])
        dist = target(b["next"]).view(-1, 3, atoms).softmax(-1)
        best = (dist * support).sum(2).argmax(1)
        dist = dist[torch.arange(rows), best]
        tz = b["rew"][:, None] + gamma * (~b["done"])[:, None] * support
        pos = (tz.clamp(v_min, v_max) - v_min) / delta
        low = pos.floor().long().clamp(max=atoms - 2)
        frac = pos - low
        out = torch.zeros(rows, atoms)
        out.scatter_add_(1, low, dist * (1 - frac))
        out.scatter_add_(1, low + 1, dist * frac)
        return out

    def train(batches):
        for i, b in enumerate(batches):
            with torch.no_grad():
                proj = project(b)
            logp = net(b["obs"]).view(-1, 3, atoms).log_softmax(-1)
            logp = logp[torch.arange(len(logp)), b["act"]]
            loss = -(proj * logp).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 10 == 9:
                target.load_state_dict(net.state_dict())

    return TrainLoop(model={"net": net, "target": target}, optimizer=optimizer, batches=transitions, fit=train)


class TinyLM(nn.Module):
    def __init__(self, vocab=17, width=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, width, padding_idx=0)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def preferences(n, rows=6, length=10, seed=14):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        batch = {}
        for kind, low in (("chosen", 1), ("rejected", 9)):
            lengths = torch.randint(5, length, (rows,), generator=g)
            ids = torch.randint(low, low + 8, (rows, length), generator=g)
            labels = ids.clone()
            labels[:, :2] = -100
            beyond = torch.arange(length)[None] >= lengths[:, None]
            batch[f"{kind}_ids"] = ids.masked_fill(beyond, 0)
            batch[f"{kind}_labels"] = labels.masked_fill(beyond, -100)
        out.append(batch)
    return out


@right(
    "rl",
    "only the margin between chosen and rejected is trained, so the chosen likelihood may fall; the "
    "first loss is log 2 whatever the model",
    thread="huggingface/trl#800",
)
def dpo():
    policy = TinyLM()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    def logps(model, ids, labels):
        logits, labels = model(ids)[:, :-1], labels[:, 1:].clone()
        mask = labels != -100
        labels[~mask] = 0
        token = logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
        return (token * mask).sum(-1)

    def dpo_loss(batch, beta=0.5):
        pc = logps(policy, batch["chosen_ids"], batch["chosen_labels"])
        pr = logps(policy, batch["rejected_ids"], batch["rejected_labels"])
        with torch.no_grad():
            rc = logps(reference, batch["chosen_ids"], batch["chosen_labels"])
            rr = logps(reference, batch["rejected_ids"], batch["rejected_labels"])
        return -F.logsigmoid(beta * ((pc - pr) - (rc - rr))).mean()

    def train(batches):
        for batch in batches:
            loss = dpo_loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batches=preferences,
        fit=train,
        padding=[
            Padding(pad_id=0, ignore_index=-100, dim=1, of=("chosen_ids", "chosen_labels")),
            Padding(pad_id=0, ignore_index=-100, dim=1, of=("rejected_ids", "rejected_labels")),
        ],
    )


@right(
    "rl",
    "GAE in place over a preallocated tensor under no_grad; returns are advantages + old values",
    thread="vwxyzjn/cleanrl#337",
)
def ppo_gae():
    agent = ActorCritic(dim=4, actions=2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)

    def gae(rewards, values, dones, gamma=0.99, lam=0.95):
        advantages, last = torch.zeros_like(rewards), torch.zeros(rewards.shape[0])
        steps = rewards.shape[1]
        for t in reversed(range(steps)):
            nxt = values[:, t + 1] if t + 1 < steps else torch.zeros_like(last)
            alive = 1.0 - dones[:, t]
            delta = rewards[:, t] + gamma * nxt * alive - values[:, t]
            advantages[:, t] = last = delta + gamma * lam * alive * last
        return advantages, advantages + values

    def make(n, rows=4, steps=8):
        g = torch.Generator().manual_seed(15)
        for _ in range(n):
            obs = torch.randn(rows, steps, 4, generator=g)
            act = torch.randint(2, (rows, steps), generator=g)
            done = (torch.rand(rows, steps, generator=g) < 0.2).float()
            yield {"obs": obs, "act": act, "rew": (act == (obs[..., 1] > 0)).float(), "done": done}

    def fit(batches):
        for b in batches:
            with torch.no_grad():
                old_logp, _, value = agent.evaluate(b["obs"], b["act"])
                adv, ret = gae(b["rew"], value.squeeze(-1), b["done"])
            for _ in range(2):
                logp, entropy, value = agent.evaluate(b["obs"], b["act"])
                ratio = (logp - old_logp).exp()
                pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                loss = pg + 0.5 * F.mse_loss(value.squeeze(-1), ret) - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return TrainLoop(model=agent, optimizer=optimizer, batches=lambda n: list(make(n)), fit=fit)


@right(
    "rl",
    "returns are divided by a running deviation and their mean stays in; the statistics move with the rollouts",
    thread="vwxyzjn/cleanrl#23",
)
def normalised_returns():
    class RunningMeanStd:
        def __init__(self):
            self.mean, self.var, self.count = 0.0, 1.0, 1e-4

        def update(self, x):
            n, mean, var = x.numel(), x.mean().item(), x.var(unbiased=False).item()
            delta, total = mean - self.mean, self.count + n
            m2 = self.var * self.count + var * n + delta**2 * self.count * n / total
            self.mean, self.var, self.count = self.mean + delta * n / total, m2 / total, total

    agent, ret_rms = ActorCritic(), RunningMeanStd()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)

    def learn(batches):
        for b in batches:
            ret_rms.update(b["ret"])
            scale = (ret_rms.var + 1e-8) ** 0.5
            ret = (b["ret"] / scale).clamp(-10, 10)
            logp, entropy, value = agent.evaluate(b["obs"], b["act"])
            value = value.squeeze(-1)
            pg_loss = -(logp * (ret - value).detach()).mean()
            loss = pg_loss + 0.5 * F.mse_loss(value, ret) - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()

    return TrainLoop(model=agent, optimizer=optimizer, batches=rollouts, fit=learn)
