"""Low precision by hand, metric learning, actor and critic, standardised targets, meta-learning."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault, right
from tests.loops.nets import mlp, relu_mlp
from tests.loops.threads.shared import clusters, fit_with, stepped


@fault(
    "precision",
    "the cumulative decay is kept in bfloat16, and differences of its entries are exponentiated",
    thread="state-spaces/mamba#923",
    check="precision_parity",
)
def gated_scan():
    class Mixer(nn.Module):
        def __init__(self, vocab=16, dim=16):
            super().__init__()
            self.embed = nn.Embedding(vocab, dim)
            self.in_proj = nn.Linear(dim, 2 * dim)
            self.dt = nn.Linear(dim, 1)
            self.A_log = nn.Parameter(torch.tensor(0.0))
            self.out = nn.Linear(dim, vocab)

        def forward(self, ids):
            h = self.embed(ids)
            x, z = self.in_proj(h).chunk(2, -1)
            dt = F.softplus(self.dt(h)).squeeze(-1)
            cs = torch.cumsum(dt * -torch.exp(self.A_log), 1).to(x.dtype)
            weights = torch.exp(cs[:, -1:] - cs) * dt
            state = torch.einsum("bt,btd->bd", weights.to(x.dtype), x)
            return self.out(state * F.silu(z[:, -1]))

    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(3)
    tokens = (torch.randint(0, 16, (24, 1), generator=g) + 3 * torch.arange(161)) % 16
    loader = DataLoader(TensorDataset(tokens), batch_size=6)

    def training_step(ids):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        return F.cross_entropy(logits.float(), ids[:, -1])

    return stepped(model, optimizer, training_step, batches=loader)


@fault(
    "precision",
    "master_params are cloned before the checkpoint is loaded, and the first step writes the old values over it",
    thread="NVIDIA/apex#42",
    check="weights_are_read",
)
def resumed_fp16():
    model = mlp(16, 32, 32, 4, activation=nn.GELU).bfloat16()
    master_params = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = torch.optim.SGD(master_params, lr=0.02, momentum=0.9)
    other = mlp(16, 32, 32, 4, activation=nn.GELU)
    checkpoint = {"state_dict": {k: v.float() * 1.5 for k, v in other.state_dict().items()}}
    model.load_state_dict(checkpoint["state_dict"])
    loader = DataLoader(TensorDataset(*clusters(48, 16, 4, noise=0.4, seed=15)), batch_size=8)

    def fit(batches):
        for x, y in batches:
            loss = 128.0 * F.cross_entropy(model(x.bfloat16()).float(), y)
            model.zero_grad()
            loss.backward()
            for master, p in zip(master_params, model.parameters(), strict=True):
                master.grad = p.grad.float() / 128.0
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(master_params, model.parameters(), strict=True):
                    p.copy_(master)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "recommenders",
    "linear.weight is replaced by a new Parameter in every forward pass, and the optimizer steps the one "
    "of the beginning",
    thread="jonasgrebe/pt-femb-face-embeddings#3",
    check="optimizer_holds_every_param",
)
def margin_header():
    class CosFaceHeader(nn.Module):
        def __init__(self, in_features=8, out_features=6, s=12.0, m=0.2):
            super().__init__()
            self.linear = nn.Linear(in_features, out_features, bias=False)
            self.s, self.m = s, m

        def forward(self, x, label):
            self.linear.weight = nn.Parameter(F.normalize(self.linear.weight.detach()))
            logits = self.linear(F.normalize(x))
            return self.s * (logits - self.m * F.one_hot(label, logits.shape[1]))

    backbone = relu_mlp(10, 24, 8)
    header = CosFaceHeader()
    optimizer = torch.optim.AdamW([{"params": backbone.parameters()}, {"params": header.parameters()}], lr=2e-3)
    g = torch.Generator().manual_seed(4)
    y = torch.randint(6, (48,), generator=g)
    x = torch.randn(6, 10, generator=g)[y] + 0.4 * torch.randn(48, 10, generator=g)

    def fit(batches):
        for xb, yb in batches:
            loss = F.cross_entropy(header(backbone(xb), yb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"backbone": backbone, "header": header},
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True),
        fit=fit,
    )


@fault(
    "recommenders",
    "the masked diagonal becomes +inf as a distance and max always picks it as the negative: the triplet term is 0",
    thread="jinnnju/PaAno#1",
    check="every_term_trains",
)
def anomaly_triplets():
    encoder = relu_mlp(10, 24, 8)
    decoder = nn.Linear(8, 10)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def compute_loss(anchor, positive):
        za, zp = F.normalize(encoder(anchor), dim=1), F.normalize(encoder(positive), dim=1)
        sim = za @ zp.T
        pos_dists = 1 - sim.diagonal()
        sim_f = sim.clone()
        sim_f.diagonal().fill_(-float("inf"))
        hard_neg_dists, _ = torch.max(1 - sim_f, dim=1)
        triplet_loss = F.relu(pos_dists - hard_neg_dists + 0.5).mean()
        pretext = F.mse_loss(decoder(za), anchor)
        return triplet_loss + pretext

    fit = fit_with(optimizer, lambda anchor: compute_loss(anchor, anchor + 0.1 * torch.randn_like(anchor)))
    g = torch.Generator().manual_seed(6)
    z, a, _, noise = (torch.randn(shape, generator=g) for shape in ((48, 6), (6, 10), (6, 9), (48, 10)))
    loader = DataLoader(TensorDataset(z @ a + 0.1 * noise), batch_size=8, shuffle=True)
    return TrainLoop(model={"encoder": encoder, "decoder": decoder}, optimizer=optimizer, batches=loader, fit=fit)


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
    actor = relu_mlp(5, 32, 4)
    q1, q2 = relu_mlp(7, 32, 1), relu_mlp(7, 32, 1)
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


@fault(
    "terms",
    "the data set has standardised the labels already, and training_step standardises them once more "
    "with the raw statistics",
    thread="deepset-ai/FARM#456",
    check="learnable_targets",
)
def lit_regression():
    import lightning

    from pytest_trainloop.adapters import from_lightning

    class LabelDataset(Dataset):
        def __init__(self, n=48):
            g = torch.Generator().manual_seed(114)
            self.x = torch.randn(n, 8, generator=g)
            raw = 60 + 9 * self.x[:, 0] - 4 * self.x[:, 3] + torch.randn(n, generator=g)
            self.mean, self.std = raw.mean().item(), raw.std().item()
            self.y = (raw - self.mean) / self.std

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return {"features": self.x[i], "label": self.y[i]}

    class LitRegressor(lightning.LightningModule):
        def __init__(self, dataset):
            super().__init__()
            self.net, self.dataset = relu_mlp(8, 24, 1), dataset

        def training_step(self, batch, batch_idx):
            target = (batch["label"] - self.dataset.mean) / self.dataset.std
            loss = F.mse_loss(self.net(batch["features"]).squeeze(-1), target)
            self.log("train_loss", loss)
            return loss

        def predict_step(self, batch, batch_idx):
            return self.net(batch["features"]).squeeze(-1) * self.dataset.std + self.dataset.mean

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=2e-3)

        def train_dataloader(self):
            return DataLoader(self.dataset, batch_size=12, shuffle=True)

    return from_lightning(LitRegressor(LabelDataset()))


@right(
    "terms",
    "first-order MAML: the gradient at adapted copies of the weights is assigned to the weights themselves",
    thread="katerakelly/pytorch-maml#11",
)
def first_order_maml():
    net = relu_mlp(1, 32, 1)
    meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def tasks(n, rows=4, shots=6):
        g = torch.Generator().manual_seed(121)
        out = []
        for _ in range(n):
            amp = torch.rand(rows, 1, 1, generator=g) * 2 + 0.5
            phase = torch.rand(rows, 1, 1, generator=g) * math.pi
            xs, xq = (torch.rand(rows, shots, 1, generator=g) * 6 - 3 for _ in range(2))
            out.append({"xs": xs, "ys": amp * (xs + phase).sin(), "xq": xq, "yq": amp * (xq + phase).sin()})
        return out

    def fit(batches, inner_lr=0.02, steps=2):
        for b in batches:
            meta_opt.zero_grad()
            grads = [torch.zeros_like(p) for p in net.parameters()]
            rows = len(b["xs"])
            for i in range(rows):
                fast = copy.deepcopy(net)
                for _ in range(steps):
                    loss = F.mse_loss(fast(b["xs"][i]), b["ys"][i])
                    inner = torch.autograd.grad(loss, list(fast.parameters()))
                    with torch.no_grad():
                        for p, g in zip(fast.parameters(), inner, strict=True):
                            p.sub_(inner_lr * g)
                outer = torch.autograd.grad(F.mse_loss(fast(b["xq"][i]), b["yq"][i]), list(fast.parameters()))
                for total, g in zip(grads, outer, strict=True):
                    total.add_(g / rows)
            for p, g in zip(net.parameters(), grads, strict=True):
                p.grad = g
            meta_opt.step()

    return TrainLoop(model=net, optimizer=meta_opt, batches=tasks, fit=fit)
