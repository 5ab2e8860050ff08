"""Recommenders and metric learning that are right although they look odd."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def interactions(n=64, seed=40):
    g = torch.Generator().manual_seed(seed)
    user = torch.randint(12, (n,), generator=g)
    pos = (user * 2 + torch.randint(4, (n,), generator=g)) % 30
    neg = (pos + torch.randint(6, 24, (n,), generator=g)) % 30
    return TensorDataset(user, pos, neg)


def classes(n=48, dim=10, k=6, seed=41):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % k
    x = torch.randn(k, dim, generator=g)[y] + 0.4 * torch.randn(n, dim, generator=g)
    return TensorDataset(x, y)


def views(n=48, seed=42):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 10, generator=g)
    return TensorDataset(z + 0.2 * torch.randn(n, 10, generator=g), z + 0.2 * torch.randn(n, 10, generator=g))


def encoder(dim=10, out=8):
    return nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, out))


class BilinearNet(nn.Module):
    def __init__(self, users=12, items=30, dim=12):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.bias = nn.Embedding(items, 1)
        nn.init.normal_(self.user.weight, std=1 / dim)
        nn.init.normal_(self.item.weight, std=1 / dim)
        nn.init.zeros_(self.bias.weight)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)


@right(
    "recommenders",
    "BPR without a logarithm: 1 - sigmoid(pos - neg) falls where the pair is ordered",
    thread="maciejkula/spotlight#185",
)
def spotlight_bpr():
    net = BilinearNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def fit(batches):
        for user, pos, neg in batches:
            loss = (1.0 - torch.sigmoid(net(user, pos) - net(user, neg))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def load(state):
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batches=DataLoader(interactions(), batch_size=16, shuffle=True),
        fit=fit,
        save=lambda: copy.deepcopy({"net": net.state_dict(), "optimizer": optimizer.state_dict()}),
        load=load,
    )


@right(
    "recommenders",
    "softplus(neg - pos) is -logsigmoid(pos - neg), with the squared norms of the batch's own embeddings",
    thread="gusye1234/LightGCN-PyTorch#37",
)
def lightgcn_bpr():
    net = BilinearNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

    def fit(batches, decay=1e-4):
        for user, pos, neg in batches:
            reg = sum(e.norm(2).pow(2) for e in (net.user(user), net.item(pos), net.item(neg))) / (2 * len(user))
            loss = F.softplus(net(user, neg) - net(user, pos)).mean() + decay * reg
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=net, optimizer=optimizer, batches=DataLoader(interactions(seed=43), batch_size=16, shuffle=True), fit=fit
    )


def sessions(n, rows=8, steps=8, seed=44):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        length = torch.randint(3, steps, (rows,), generator=g)
        first = torch.randint(1, 25, (rows, 1), generator=g)
        seq = (first + torch.arange(steps + 1)[None] * 2) % 28 + 1
        beyond = torch.arange(steps)[None] >= length[:, None]
        out.append({"x": seq[:, :-1].masked_fill(beyond, 0), "y": seq[:, 1:].masked_fill(beyond, 0)})
    return out


@right(
    "recommenders",
    "BPR over the other targets of the batch; the positive is among its own negatives, which adds a constant log 2",
    thread="hidasib/GRU4Rec#33",
)
def gru4rec():
    class GRU4Rec(nn.Module):
        def __init__(self, items=30, dim=16):
            super().__init__()
            self.emb = nn.Embedding(items, dim, padding_idx=0)
            self.gru = nn.GRU(dim, dim, batch_first=True)

        def forward(self, x, y):
            h = self.gru(self.emb(x))[0]
            keep = y > 0
            return h[keep] @ self.emb(y[keep]).T

    model = GRU4Rec()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    def bpr(yhat):
        return -F.logsigmoid(yhat.diagonal().unsqueeze(1) - yhat).mean()

    def fit(batches):
        for b in batches:
            loss = bpr(model(b["x"], b["y"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=sessions, fit=fit)


@right(
    "recommenders",
    "a symmetric InfoNCE with a learned logarithm of the temperature that is clamped after the step",
    thread="openai/CLIP#46",
)
def clip_style():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.visual, self.textual = encoder(), encoder()
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, a, b):
            a, b = F.normalize(self.visual(a), dim=-1), F.normalize(self.textual(b), dim=-1)
            return self.logit_scale.exp() * a @ b.T

    model = Model()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
    )

    def fit(batches):
        for a, b in batches:
            logits = model(a, b)
            labels = torch.arange(len(a))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(views(), batch_size=8, shuffle=True),
        fit=fit,
        rows_interact=True,
    )


@right(
    "recommenders",
    "all labels are 0: the positive is column 0 before a queue of keys that a momentum encoder wrote",
    thread="facebookresearch/moco#24",
)
def moco():
    class MoCo(nn.Module):
        def __init__(self, k=24, m=0.99, t=0.2):
            super().__init__()
            self.encoder_q = encoder()
            self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(8, k), dim=0))
            self.ptr, self.k, self.m, self.t = 0, k, m, t

        def forward(self, im_q, im_k):
            q = F.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                for pq, pk in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    pk.data.mul_(self.m).add_(pq.data, alpha=1 - self.m)
                k = F.normalize(self.encoder_k(im_k), dim=1)
            l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
            l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
            logits = torch.cat([l_pos, l_neg], dim=1) / self.t
            labels = torch.zeros(logits.shape[0], dtype=torch.long)
            with torch.no_grad():
                where = (self.ptr + torch.arange(len(k))) % self.k
                self.queue[:, where] = k.T
                self.ptr = int((self.ptr + len(k)) % self.k)
            return logits, labels

    model = MoCo()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.03, momentum=0.9)

    def fit(batches):
        for a, b in batches:
            loss = F.cross_entropy(*model(a, b))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(views(seed=45), batch_size=8, shuffle=True), fit=fit
    )


@right(
    "recommenders",
    "positives stay in the denominator, the anchor does not, and the loss is scaled by temperature / base_temperature",
    thread="HobbitLong/SupContrast#64",
)
def supcon():
    class SupConLoss(nn.Module):
        def __init__(self, temperature=0.1, base_temperature=0.07):
            super().__init__()
            self.temperature, self.base_temperature = temperature, base_temperature

        def forward(self, features, labels):
            n, v, _ = features.shape
            mask = torch.eq(labels.view(-1, 1), labels.view(1, -1)).float().repeat(v, v)
            feats = torch.cat(torch.unbind(features, dim=1), dim=0)
            logits = feats @ feats.T / self.temperature
            logits = logits - logits.max(dim=1, keepdim=True)[0].detach()
            logits_mask = 1 - torch.eye(n * v)
            mask = mask * logits_mask
            log_prob = logits - torch.log((torch.exp(logits) * logits_mask).sum(1, keepdim=True))
            mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1).clamp(min=1)
            return -(self.temperature / self.base_temperature) * mean_log_prob_pos.mean()

    net = encoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    criterion = SupConLoss()

    def fit(batches):
        for x, y in batches:
            both = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
            f1, f2 = F.normalize(net(both), dim=1).chunk(2)
            loss = criterion(torch.stack([f1, f2], dim=1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batches=DataLoader(classes(), batch_size=12, shuffle=True),
        fit=fit,
    )


@right(
    "recommenders",
    "cos(theta + m), and behind pi - m a linear continuation: an additive margin at the label's entry only",
    thread="KevinMusgrave/pytorch-metric-learning#537",
)
def arcface():
    class ArcFace(nn.Module):
        def __init__(self, dim=8, k=6, s=16.0, margin=0.4):
            super().__init__()
            self.W = nn.Parameter(torch.randn(k, dim) * 0.3)
            self.s, self.margin = s, margin
            self.theta, self.sinmm = math.cos(math.pi - margin), math.sin(math.pi - margin) * margin

        def forward(self, emb, labels):
            cosine = F.linear(F.normalize(emb), F.normalize(self.W))
            index = torch.arange(len(labels))
            target = cosine[index, labels]
            sin_theta = torch.sqrt(1.0 - target.pow(2).clamp(max=1 - 1e-6))
            shifted = target * math.cos(self.margin) - sin_theta * math.sin(self.margin)
            final = torch.where(target > self.theta, shifted, target - self.sinmm)
            logits = cosine.clone()
            logits[index, labels] = final
            return F.cross_entropy(logits * self.s, labels)

    trunk, head = encoder(), ArcFace()
    trunk_opt = torch.optim.Adam(trunk.parameters(), lr=1e-3)
    loss_opt = torch.optim.SGD(head.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            trunk_opt.zero_grad()
            loss_opt.zero_grad()
            head(trunk(x), y).backward()
            trunk_opt.step()
            loss_opt.step()

    return TrainLoop(
        model={"trunk": trunk, "head": head},
        optimizer=[trunk_opt, loss_opt],
        batches=DataLoader(classes(seed=46), batch_size=12, shuffle=True),
        fit=fit,
    )


@right(
    "recommenders",
    "batch-hard triplets with a soft margin: softplus of distances to the farthest positive and the "
    "nearest negative, itself among the positives",
    thread="omoindrot/tensorflow-triplet-loss#51",
)
def batch_hard():
    net = encoder()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def batch_hard_triplet_loss(emb, labels):
        sq = (emb.unsqueeze(1) - emb.unsqueeze(0)).pow(2).sum(-1)
        dist = torch.sqrt(sq + 1e-8)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        hardest_pos = dist.masked_fill(~same, 0.0).max(1)[0]
        hardest_neg = (dist + 1e4 * same).min(1)[0]
        valid = (~same).any(1)
        return (F.softplus(hardest_pos - hardest_neg) * valid).sum() / valid.sum().clamp(min=1)

    def fit(batches):
        for x, y in batches:
            loss = batch_hard_triplet_loss(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batches=DataLoader(classes(seed=47), batch_size=16, shuffle=True),
        fit=fit,
    )


@right(
    "recommenders",
    "a negative cosine whose target branch is detached; the loss falls below 0, to -1",
    thread="PatrickHua/SimSiam#22",
)
def simsiam():
    backbone = encoder(out=12)
    predictor = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 12))
    optimizer = torch.optim.SGD([*backbone.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)

    def negative_cosine(p, z):
        z = z.detach()
        return -(F.normalize(p, dim=1) * F.normalize(z, dim=1)).sum(dim=1).mean()

    def fit(batches):
        for x1, x2 in batches:
            z1, z2 = backbone(x1), backbone(x2)
            p1, p2 = predictor(z1), predictor(z2)
            loss = negative_cosine(p1, z2) / 2 + negative_cosine(p2, z1) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"backbone": backbone, "predictor": predictor},
        optimizer=optimizer,
        batches=DataLoader(views(seed=48), batch_size=12, shuffle=True),
        fit=fit,
    )


@right(
    "recommenders",
    "the log of an item's probability of being sampled is subtracted from its column, duplicates of the "
    "positive are masked",
    thread="tensorflow/recommenders#219",
)
def in_batch_softmax():
    class TwoTower(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12))
            self.item = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 12))

    data = interactions(seed=49)
    log_q = (torch.bincount(data.tensors[1], minlength=30).float() / len(data)).clamp(min=1e-6).log()
    model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def fit(batches):
        for user, item, _ in batches:
            logits = model.user(user) @ model.item(item).T - log_q[item]
            twins = (item.unsqueeze(0) == item.unsqueeze(1)) & ~torch.eye(len(item), dtype=torch.bool)
            logits = logits.masked_fill(twins, -1e9)
            loss = F.cross_entropy(logits, torch.arange(len(item)), reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=10, shuffle=True),
        fit=fit,
        rows_interact=True,
    )
