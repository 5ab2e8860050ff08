"""Rows that meet on purpose, or that only seem to."""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

from pytest_trainloop import Padding, TrainLoop
from pytest_trainloop.adapters import from_lightning, from_trainer
from tests.blind.cases import right


def loader(*tensors, batch_size):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(*tensors), batch_size, shuffle=True, generator=generator, drop_last=True)


def encoder(inputs, outputs, hidden=24):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def fit_with(optimizer, step):
    def train(batches):
        for batch in batches:
            loss = step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


@right(
    "rows",
    "labels are all zeros since the positive is column 0; negatives come from a queue of earlier batches",
    thread="amazon-science/video-contrastive-learning#5",
)
def momentum_queue():
    torch.manual_seed(0)

    class MoCo(nn.Module):
        def __init__(self, dim=8, size=48, momentum=0.99):
            super().__init__()
            self.momentum = momentum
            self.query = encoder(10, dim)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def keys(self, x):
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.mul_(self.momentum).add_(q, alpha=1 - self.momentum)
            return F.normalize(self.key(x), dim=1)

        @torch.no_grad()
        def enqueue(self, keys):
            places = (self.pointer + torch.arange(len(keys))) % self.queue.shape[1]
            self.queue[:, places] = keys.T
            self.pointer[0] = (self.pointer[0] + len(keys)) % self.queue.shape[1]

        def forward(self, x_q, x_k):
            q, k = F.normalize(self.query(x_q), dim=1), self.keys(x_k)
            positive = torch.einsum("nc,nc->n", q, k)[:, None]
            negative = torch.einsum("nc,ck->nk", q, self.queue.clone())
            self.enqueue(k)
            return torch.cat([positive, negative], dim=1) / 0.2

    model = MoCo()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    data = loader(torch.randn(48, 10), torch.randn(48, 10), batch_size=12)

    def step(batch):
        logits = model(*batch)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step), frozen=("key.",))


@right(
    "rows",
    "both views stand one after the other; rows i and i + n are the positives, and labels are zeros",
    thread="sthalles/SimCLR#29",
)
def simclr_views():
    torch.manual_seed(0)
    model = encoder(9, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randn(40, 9), torch.randn(40, 9), batch_size=10)

    def info_nce_loss(features, n, temperature=0.5):
        labels = torch.cat([torch.arange(n)] * 2)
        labels = labels[:, None] == labels[None]
        features = F.normalize(features, dim=1)
        similarity = features @ features.T
        own = torch.eye(2 * n, dtype=torch.bool)
        labels, similarity = labels[~own].view(2 * n, -1), similarity[~own].view(2 * n, -1)
        positives, negatives = similarity[labels].view(2 * n, -1), similarity[~labels].view(2 * n, -1)
        logits = torch.cat([positives, negatives], dim=1) / temperature
        return F.cross_entropy(logits, torch.zeros(2 * n, dtype=torch.long))

    def step(views):
        return info_nce_loss(model(torch.cat(list(views))), len(views[0]))

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "the blocks stand as [01|00] and [10|11], so that labels arange(n) twice point at the other view",
    thread="lightly-ai/lightly#1396",
)
def lightly_order():
    torch.manual_seed(0)
    model = encoder(9, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = loader(torch.randn(40, 9), batch_size=10)

    def step(batch):
        (x,) = batch
        n = len(x)
        out0, out1 = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        off = ~torch.eye(n, dtype=torch.bool)
        l00, l11 = (out0 @ out0.T)[off].view(n, -1), (out1 @ out1.T)[off].view(n, -1)
        l01, l10 = out0 @ out1.T, out1 @ out0.T
        logits = torch.cat((torch.cat((l01, l00), 1), torch.cat((l10, l11), 1))) / 0.5
        return F.cross_entropy(logits, torch.arange(n).repeat(2))

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "the argument labels is not used: a[i] belongs to b[i], and all other b are its negatives",
    thread="huggingface/sentence-transformers#1689",
)
def multiple_negatives():
    torch.manual_seed(0)

    class Sentences(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 16)
            self.dense = nn.Linear(16, 12)

        def forward(self, features):
            mask = features["attention_mask"][..., None].float()
            pooled = (self.embed(features["input_ids"]) * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return {"sentence_embedding": self.dense(pooled)}

    model = Sentences()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    class MultipleNegativesRankingLoss(nn.Module):
        def __init__(self, net, scale=20.0):
            super().__init__()
            self.model, self.scale = net, scale

        def forward(self, sentence_features, labels):
            reps = [self.model(feature)["sentence_embedding"] for feature in sentence_features]
            a, b = reps[0], torch.cat(reps[1:])
            scores = F.cosine_similarity(a[:, None], b[None], dim=-1) * self.scale
            return F.cross_entropy(scores, torch.arange(len(scores)))

    criterion = MultipleNegativesRankingLoss(model)

    def sentence(n=8):
        lengths = torch.randint(2, 7, (n,))
        mask = torch.arange(6) < lengths[:, None]
        return {"input_ids": torch.randint(1, 40, (n, 6)) * mask, "attention_mask": mask.long()}

    data = [([sentence(), sentence(), sentence()], torch.zeros(8)) for _ in range(4)]
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=data,
        fit=fit_with(optimizer, lambda b: criterion(*b)),
        padding=Padding(pad_id=0),
    )


@right(
    "rows",
    "the batch rolled by one row gives the pairs that do not match",
    thread="ignacio-rocco/ncnet#2",
)
def rolled_pairs():
    torch.manual_seed(0)

    class Matcher(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Conv2d(1, 8, 3)
            self.refine = nn.Linear(16, 16)

        def forward(self, batch):
            a = F.normalize(self.features(batch["source_image"]).flatten(2), dim=1)
            b = F.normalize(self.features(batch["target_image"]).flatten(2), dim=1)
            return self.refine(a.mT @ b)

    model = Matcher()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    def weak_loss(batch):
        def score(correlation):
            return 0.5 * (correlation.softmax(1).amax(1).mean() + correlation.softmax(2).amax(2).mean())

        positive = score(model(batch))
        b = len(batch["source_image"])
        rolled = batch["source_image"][np.roll(np.arange(b), -1), :]
        negative = score(model({**batch, "source_image": rolled}))
        return negative - positive

    data = [{"source_image": torch.rand(7, 1, 6, 6), "target_image": torch.rand(7, 1, 6, 6)} for _ in range(3)]
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, weak_loss))


@right(
    "rows",
    "the covariance is x.T @ x over the rows of the batch: it is of the features",
    thread="facebookresearch/vicreg#25",
)
def vicreg():
    torch.manual_seed(0)
    backbone, projector = encoder(9, 12), encoder(12, 10)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *projector.parameters()], lr=1e-3)
    data = loader(torch.randn(44, 9), torch.randn(44, 9), batch_size=11)

    def off_diagonal(matrix):
        return matrix[~torch.eye(len(matrix), dtype=torch.bool)]

    def step(batch):
        x, y = (projector(backbone(view)) for view in batch)
        invariance = F.mse_loss(x, y)
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
        std_x, std_y = (torch.sqrt(z.var(dim=0) + 1e-4) for z in (x, y))
        variance = F.relu(1 - std_x).mean() / 2 + F.relu(1 - std_y).mean() / 2
        n = len(x)
        covariance = sum(off_diagonal(z.T @ z / (n - 1)).pow(2).sum() / z.shape[1] for z in (x, y))
        return 25 * invariance + 25 * variance + covariance

    return TrainLoop(
        model={"backbone": backbone, "projector": projector},
        optimizer=optimizer,
        batches=data,
        fit=fit_with(optimizer, step),
    )


@right(
    "rows",
    "Barlow Twins: batch norm without weights, then the cross correlation over the rows against the identity",
    thread="facebookresearch/barlowtwins#16",
)
def barlow_twins():
    torch.manual_seed(0)

    class BarlowTwins(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.projector = encoder(9, 12), nn.Linear(12, 10, bias=False)
            self.bn = nn.BatchNorm1d(10, affine=False)

        def forward(self, y1, y2):
            z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
            c = self.bn(z1).T @ self.bn(z2) / len(z1)
            on_diagonal = (torch.diagonal(c) - 1).pow(2).sum()
            off_diagonal = c.pow(2).sum() - torch.diagonal(c).pow(2).sum()
            return on_diagonal + 0.0051 * off_diagonal

    model = BarlowTwins()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = loader(torch.randn(42, 9), torch.randn(42, 9), batch_size=14)

    def train(batches):
        model.train()
        fit_with(optimizer, lambda batch: model(*batch))(batches)

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@right(
    "rows",
    "batch-hard triplets: the furthest row of the same label, the nearest one of another",
    thread="KevinMusgrave/pytorch-metric-learning#476",
)
def batch_hard():
    torch.manual_seed(0)
    model = encoder(10, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)

    def step(batch):
        embeddings, labels = model(batch["image"]), batch["pid"]
        distances = torch.cdist(embeddings, embeddings)
        same = labels[:, None] == labels[None]
        hardest_positive = distances.masked_fill(~same, 0).max(1).values
        hardest_negative = distances.masked_fill(same, float("inf")).min(1).values
        return F.softplus(hardest_positive - hardest_negative).mean()

    def draw(people=4, each=3):
        pid = torch.randperm(20)[:people].repeat_interleave(each)
        return {"image": torch.randn(people * each, 10), "pid": pid}

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [draw() for _ in range(n)],
        fit=fit_with(optimizer, step),
    )


@right(
    "rows",
    "mix-up with the flipped batch, images and targets alike; of an odd number the middle row mixes with itself",
    thread="pytorch/vision#4379",
)
def flipped_mixup():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = loader(torch.randn(45, 1, 6, 6), torch.randint(0, 5, (45,)), batch_size=9)

    def step(batch):
        image, label = batch
        target = F.one_hot(label, 5).float() * 0.9 + 0.02
        lam = torch.distributions.Beta(0.8, 0.8).sample()
        image = lam * image + (1 - lam) * image.flip(0)
        target = lam * target + (1 - lam) * target.flip(0)
        return torch.sum(-target * model(image).log_softmax(-1), dim=-1).mean()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "one permutation for images and labels, and two cross entropies weighted by lam",
    thread="xudonmao/VMT#1",
)
def shared_permutation():
    torch.manual_seed(0)
    model = encoder(12, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randn(50, 12), torch.randint(0, 4, (50,)), batch_size=10)

    def step(batch):
        x, y = batch
        lam, index = float(torch.rand(())), torch.randperm(len(x))
        output = model(lam * x + (1 - lam) * x[index])
        return lam * F.cross_entropy(output, y) + (1 - lam) * F.cross_entropy(output, y[index])

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "Cox: risks are sorted by falling time and summed up over the rows, ties in the order of the batch",
    thread="havakv/pycox#27",
)
def deep_surv():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = loader(torch.randn(52, 8), torch.rand(52) * 10, (torch.rand(52) < 0.7).float(), batch_size=13)

    def cox_ph_loss_sorted(log_h, events, eps=1e-7):
        gamma = log_h.max()
        log_cumsum_h = log_h.sub(gamma).exp().cumsum(0).add(eps).log().add(gamma)
        return -log_h.sub(log_cumsum_h).mul(events).sum().div(events.sum().clamp(min=1))

    def step(batch):
        x, durations, events = batch
        order = durations.sort(descending=True)[1]
        return cox_ph_loss_sorted(model(x).view(-1)[order], events[order])

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "one forward pass per bag, risks kept with their graphs, and one Cox loss and one step per window of eight bags",
    thread="clemsgrs/hipt#19",
)
def bags_for_cox():
    torch.manual_seed(0)

    class BagModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.phi, self.gate, self.rho = nn.Linear(6, 12), nn.Linear(12, 1), nn.Linear(12, 1)

        def forward(self, bag):
            h = torch.relu(self.phi(bag))
            return self.rho((self.gate(h).softmax(dim=0) * h).sum(0))

    class Case(NamedTuple):
        bag: torch.Tensor
        time: torch.Tensor
        censored: torch.Tensor

    model = BagModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for window in batches:
            risk = torch.cat([model(case.bag) for case in window])
            time = torch.stack([case.time for case in window])
            event = 1 - torch.stack([case.censored for case in window])
            order = time.argsort(descending=True)
            risk, event = risk[order], event[order]
            loss = -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw():
        return [Case(torch.randn(3 + i % 4, 6), torch.rand(()), torch.tensor(float(i % 2))) for i in range(8)]

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(3)], fit=train)


@right(
    "rows",
    "focal loss of each row before the mean, alpha chosen by the row's class",
    thread="kornia/kornia#875",
)
def focal_rows(accumulate=1):
    torch.manual_seed(0)
    model = encoder(8, 3)
    alpha = torch.tensor([0.2, 0.3, 0.5])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randn(48, 8), torch.randint(0, 3, (48,)), batch_size=12)

    def step(batch):
        x, target = batch
        ce = F.cross_entropy(model(x), target, reduction="none")
        return (alpha[target] * (1 - (-ce).exp()) ** 2 * ce).mean()

    def train(batches):
        for i, batch in enumerate(batches, start=1):
            (step(batch) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@right(
    "rows",
    "a cross entropy with class weights divides by the weights of the rows in the batch",
    thread="mathiaszinnen/focal_loss_torch#18",
)
def class_weights():
    torch.manual_seed(0)
    model = encoder(7, 4)
    counts = torch.tensor([40.0, 20.0, 10.0, 5.0])
    criterion = nn.CrossEntropyLoss(weight=counts.sum() / (4 * counts))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    labels = torch.arange(4).repeat_interleave(torch.tensor([20, 15, 10, 5]))
    data = loader(torch.randn(50, 7), labels, batch_size=10)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=data,
        fit=fit_with(optimizer, lambda b: criterion(model(b[0]), b[1])),
    )


class SKAttention(nn.Module):
    def __init__(self, channel=6, reduced=5, kernels=(1, 3, 5)):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channel, channel, k, padding=k // 2) for k in kernels)
        self.fc = nn.Linear(channel, reduced)
        self.fcs = nn.ModuleList(nn.Linear(reduced, channel) for _ in kernels)
        self.softmax = nn.Softmax(dim=0)

    def forward(self, x):
        feats = torch.stack([conv(x) for conv in self.convs], 0)
        z = self.fc(feats.sum(0).mean((-1, -2)))
        weights = torch.stack([fc(z)[..., None, None] for fc in self.fcs], 0)
        return (self.softmax(weights) * feats).sum(0)


@right(
    "rows",
    "Softmax(dim=0) is over the stacked kernels: weights are (kernels, rows, channels, 1, 1)",
    thread="xmu-xiaoma666/External-Attention-pytorch#18",
)
def selective_kernels(accumulate=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), SKAttention(), nn.Flatten(), nn.Linear(6 * 16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randn(40, 1, 6, 6), torch.randint(0, 4, (40,)), batch_size=8)

    def train(batches):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train, rows_interact=False)


@right(
    "rows",
    "states are (length, rows, dim), so softmax(dim=0) of the scores is over the positions of each question",
    thread="xhuang31/KEQA_WSDM19#2",
)
def length_first_attention():
    torch.manual_seed(0)

    class EmbedVector(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm = nn.Embedding(30, 12), nn.LSTM(12, 12, bidirectional=True)
            self.attn, self.out = nn.Linear(12 + 24, 1), nn.Linear(24, 5)

        def forward(self, text):
            x = self.embed(text.t())
            outputs, _ = self.lstm(x)
            weights = F.softmax(self.attn(torch.cat((x, outputs), -1)), dim=0)
            return self.out((weights * outputs).sum(0))

    model = EmbedVector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randint(0, 30, (44, 7)), torch.randn(44, 5), batch_size=11)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=data,
        fit=fit_with(optimizer, lambda b: F.mse_loss(model(b[0]), b[1])),
    )


@right(
    "rows",
    "ListMLE without labels: the documents of a query come sorted by relevance, so their order is the target",
    thread="wildltr/ptranking#4",
)
def sorted_documents():
    torch.manual_seed(0)
    scorer = encoder(6, 1)
    optimizer = torch.optim.Adam(scorer.parameters(), lr=1e-3)

    def queries(n=5, documents=9):
        relevance = torch.randint(0, 4, (n, documents)).float()
        stds, order = relevance.sort(dim=1, descending=True)
        features = torch.randn(n, documents, 6).gather(1, order[..., None].expand(-1, -1, 6))
        return features, stds

    def step(batch):
        features, _ = batch
        preds = scorer(features).squeeze(-1)
        return torch.sum(preds.flip(1).logcumsumexp(1).flip(1) - preds)

    return TrainLoop(
        model=scorer,
        optimizer=optimizer,
        batches=[queries() for _ in range(4)],
        fit=fit_with(optimizer, step),
    )


@right(
    "rows",
    "a batch is one query: ListNet's softmax is over its documents, which are the rows",
    thread="allegro/allRank#38",
)
def one_query():
    torch.manual_seed(0)
    scorer = encoder(6, 1)
    optimizer = torch.optim.SGD(scorer.parameters(), lr=0.01)

    def step(batch):
        documents, relevance = batch
        scores = scorer(documents).squeeze(-1)
        return -(relevance.softmax(0) * scores.log_softmax(0)).sum()

    data = [(torch.randn(n, 6), torch.randint(0, 5, (n,)).float()) for n in (8, 11, 9, 13)]
    return TrainLoop(model=scorer, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step), rows_interact=True)


@right(
    "rows",
    "rows without a positive divide by one and cost nothing; the view axis holds two normalised features",
    thread="HobbitLong/SupContrast#142",
)
def supcon_fixed():
    torch.manual_seed(0)
    model = encoder(10, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = DataLoader(TensorDataset(torch.randn(33, 10), torch.arange(33) % 5), 16)

    def step(batch):
        x, labels = batch
        features = F.normalize(model(x), dim=1)
        others = 1 - torch.eye(len(labels))
        mask = (labels[:, None] == labels[None]).float() * others
        logits = features @ features.T / 0.2
        logits = logits - logits.amax(1, keepdim=True).detach()
        log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True) + 1e-12)
        count = mask.sum(1)
        count = torch.where(count < 1e-6, 1.0, count)
        return -((mask * log_prob).sum(1) / count).mean()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


class GBN(nn.Module):
    def __init__(self, dim, virtual_batch_size=4):
        super().__init__()
        self.virtual_batch_size, self.bn = virtual_batch_size, nn.BatchNorm1d(dim, momentum=0.02)

    def forward(self, x):
        chunks = x.chunk(math.ceil(len(x) / self.virtual_batch_size), 0)
        return torch.cat([self.bn(chunk) for chunk in chunks], dim=0)


@right(
    "rows",
    "ghost batch norm: one BatchNorm1d over chunks of four rows each",
    thread="dreamquark-ai/tabnet#384",
)
def ghost_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 16, bias=False), GBN(16), nn.GLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    data = loader(torch.randn(48, 9), torch.randint(0, 3, (48,)), batch_size=12)

    def train(batches):
        model.train()
        fit_with(optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]))(batches)

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@right(
    "rows",
    "the critic sees the deviation over groups of four rows; view(group, -1) and repeat(group) match",
    thread="rosinality/stylegan2-pytorch#124",
)
def stddev_groups():
    torch.manual_seed(0)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 6, 3), nn.Linear(7 * 9, 1)

        def forward(self, x):
            out = F.leaky_relu(self.conv(x), 0.2)
            n, c, h, w = out.shape
            group = min(n, 4)
            stddev = out.view(group, -1, 1, c, h, w)
            stddev = torch.sqrt(stddev.var(0, unbiased=False) + 1e-8)
            stddev = stddev.mean([2, 3, 4], keepdim=True).squeeze(2).repeat(group, 1, h, w)
            return self.out(torch.cat([out, stddev], 1).flatten(1))

    generator = nn.Sequential(nn.Linear(4, 25), nn.Tanh(), nn.Unflatten(1, (1, 5, 5)))
    critic = Discriminator()
    g_optim = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    d_optim = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.99))
    data = loader(torch.rand(48, 1, 5, 5) * 2 - 1, batch_size=12)

    def train(batches):
        for (real,) in batches:
            fake = generator(torch.randn(len(real), 4)).detach()
            d_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
            d_optim.zero_grad()
            d_loss.backward()
            d_optim.step()
            g_loss = F.softplus(-critic(generator(torch.randn(len(real), 4)))).mean()
            g_optim.zero_grad()
            g_loss.backward()
            g_optim.step()

    return TrainLoop(
        model={"generator": generator, "critic": critic}, optimizer=[g_optim, d_optim], batches=data, fit=train
    )


@right(
    "rows",
    "the corpus is one long text in five columns: the hidden state goes on from batch to batch, detached",
    thread="pytorch/examples#103",
)
def word_language_model():
    torch.manual_seed(0)

    class RNNModel(nn.Module):
        def __init__(self, ntoken=20, ninp=12, nhid=16):
            super().__init__()
            self.encoder, self.rnn = nn.Embedding(ntoken, ninp), nn.LSTM(ninp, nhid)
            self.decoder = nn.Linear(nhid, ntoken)

        def forward(self, data, hidden):
            output, hidden = self.rnn(self.encoder(data), hidden)
            return F.log_softmax(self.decoder(output).flatten(0, 1), dim=1), hidden

        def init_hidden(self, columns):
            return torch.zeros(1, columns, 16), torch.zeros(1, columns, 16)

    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    source, bptt = torch.randint(0, 20, (7 * 6 + 1, 5)), 7

    def get_batch(i):
        return source[i : i + bptt], source[i + 1 : i + 1 + bptt].flatten()

    def train(batches):
        model.train()
        hidden = None
        for data, targets in batches:
            hidden = model.init_hidden(data.shape[1]) if hidden is None else tuple(h.detach() for h in hidden)
            optimizer.zero_grad()
            output, hidden = model(data, hidden)
            loss = F.nll_loss(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()

    batches = [get_batch(i) for i in range(0, len(source) - 1, bptt)]
    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=train, batch_dim=1)


class SparseMoE(nn.Module):
    def __init__(self, dim=12, experts=4, top_k=2):
        super().__init__()
        self.gate, self.top_k = nn.Linear(dim, experts, bias=False), top_k
        self.experts = nn.ModuleList(encoder(dim, dim, 12) for _ in range(experts))

    def forward(self, x):
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, slot = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        load = F.one_hot(chosen, len(self.experts)).float().sum(1).mean(0) / self.top_k
        return out, len(self.experts) * (load * probabilities.mean(0)).sum()


@right(
    "rows",
    "the balance loss of the experts is made of means over all rows of the batch",
    thread="allenai/OLMoE#45",
)
def balanced_experts():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs, self.moe, self.out = nn.Linear(7, 12), SparseMoE(), nn.Linear(12, 3)

        def forward(self, x):
            h = self.inputs(x)
            mixed, balance = self.moe(h)
            return self.out(h + mixed), balance

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = loader(torch.randn(64, 7), torch.randint(0, 3, (64,)), batch_size=16)

    def step(batch):
        logits, balance = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.01 * balance

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "CPC: encodings of the other rows at the same time step are the negatives, positives lie on the diagonal",
    thread="jefflai108/Contrastive-Predictive-Coding-PyTorch#16",
)
def predictive_coding():
    torch.manual_seed(0)

    class CDCK(nn.Module):
        def __init__(self, timestep=3):
            super().__init__()
            self.timestep = timestep
            self.encoder = nn.Conv1d(1, 8, 4, stride=4)
            self.gru = nn.GRU(8, 10, batch_first=True)
            self.Wk = nn.ModuleList(nn.Linear(10, 8) for _ in range(timestep))

        def forward(self, x):
            z = self.encoder(x).transpose(1, 2)
            t = int(torch.randint(1, z.shape[1] - self.timestep, (1,)))
            c = self.gru(z[:, : t + 1])[0][:, t]
            nce = 0
            for k, w in enumerate(self.Wk, start=1):
                total = z[:, t + k] @ w(c).T
                nce = nce + torch.diag(F.log_softmax(total, dim=1)).sum()
            return -nce / (len(x) * self.timestep)

    model = CDCK()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, amsgrad=True)
    data = loader(torch.randn(36, 1, 48), batch_size=9)
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, lambda b: model(b[0])))


@right(
    "rows",
    "balanced MSE: predictions (n, 1) against targets (1, n) on purpose, the row's own target is the class",
    thread="jiawei-ren/BalancedMSE#19",
)
def balanced_mse():
    torch.manual_seed(0)
    model = encoder(6, 1)

    class BMCLoss(nn.Module):
        def __init__(self, sigma=1.0):
            super().__init__()
            self.noise_sigma = nn.Parameter(torch.tensor(sigma))

        def forward(self, pred, target):
            variance = self.noise_sigma**2
            logits = -0.5 * (pred - target.T).pow(2) / variance
            loss = F.cross_entropy(logits, torch.arange(len(pred)))
            return loss * (2 * variance).detach()

    criterion = BMCLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.add_param_group({"params": criterion.noise_sigma, "lr": 1e-2, "name": "noise_sigma"})
    data = loader(torch.randn(48, 6), torch.randn(48, 1).exp(), batch_size=12)
    return TrainLoop(
        model={"model": model, "criterion": criterion},
        optimizer=optimizer,
        batches=data,
        fit=fit_with(optimizer, lambda b: criterion(model(b[0]), b[1])),
    )


class PMA(nn.Module):
    def __init__(self, dim, seeds):
        super().__init__()
        self.seed = nn.Parameter(torch.randn(1, seeds, dim) * 0.2)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x):
        seeds = self.seed.expand(len(x), -1, -1)
        return seeds + self.attention(seeds, x, x)[0]


@right(
    "rows",
    "set transformer: the elements of a set attend to each other, sets do not; the seeds are shared by all rows",
    thread="dmlc/dgl#2660",
)
def set_transformer():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs = nn.Linear(2, 16)
            self.sab = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
            self.pma, self.out = PMA(16, 3), nn.Linear(48, 2)

        def forward(self, x):
            return self.out(self.pma(self.sab(self.inputs(x))).flatten(1))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randn(36, 8, 2), torch.randn(36, 2), batch_size=6)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=data,
        fit=fit_with(optimizer, lambda b: F.smooth_l1_loss(model(b[0]), b[1])),
        rows_interact=False,
    )


@right(
    "rows",
    "soft experts: dispatch.softmax(dim=1) is over the tokens of a row, which are the paper's axis 0",
    thread="fkodom/soft-mixture-of-experts#1",
)
def soft_experts_by_row():
    torch.manual_seed(0)

    class SoftMoE(nn.Module):
        def __init__(self, dim=12, experts=3, slots=2):
            super().__init__()
            self.phi = nn.Parameter(torch.randn(dim, experts, slots) / dim**0.5)
            self.weight = nn.Parameter(torch.randn(experts, dim, dim) / dim**0.5)

        def forward(self, x):
            logits = torch.einsum("bnd,des->bnes", x, self.phi)
            dispatch = logits.softmax(dim=1)
            combine = logits.flatten(2).softmax(dim=-1).view_as(logits)
            slots = torch.einsum("bnd,bnes->besd", x, dispatch)
            return torch.einsum("besd,edf,bnes->bnf", slots, self.weight, combine)

    embed, moe, head = nn.Linear(5, 12), SoftMoE(), nn.Linear(12, 4)
    model = nn.ModuleDict({"embed": embed, "moe": moe, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = loader(torch.randn(36, 7, 5), torch.randint(0, 4, (36,)), batch_size=9)

    def step(batch):
        x = embed(batch[0])
        return F.cross_entropy(head((x + moe(x)).mean(1)), batch[1])

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "rows are sorted by length for packing and brought back by argsort of the order",
    thread="pytorch/pytorch#4927",
)
def sort_and_restore():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Embedding(25, 12, padding_idx=0), nn.GRU(12, 12, batch_first=True)
            self.out = nn.Linear(12, 3)

        def forward(self, ids, lengths):
            sorted_lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(self.embed(ids[order]), sorted_lengths, batch_first=True)
            return self.out(self.gru(packed)[1][-1][order.argsort()])

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @dataclass
    class Text:
        ids: torch.Tensor
        lengths: torch.Tensor
        label: torch.Tensor

    def draw(n=7):
        lengths = torch.randperm(9)[:n] + 1
        ids = torch.randint(1, 25, (n, int(lengths.max()))) * (torch.arange(int(lengths.max())) < lengths[:, None])
        return Text(ids, lengths, torch.randint(0, 3, (n,)))

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [draw() for _ in range(n)],
        fit=fit_with(optimizer, lambda t: F.cross_entropy(model(t.ids, t.lengths), t.label)),
        padding=Padding(pad_id=0),
    )


@right(
    "rows",
    "MixStyle: the mean and deviation of feature maps, detached, are mixed with those of a row of the other half",
    thread="Feaxure-fresh/TL-Fault-Diagnosis-Library#6",
)
def mix_style():
    torch.manual_seed(0)

    class MixStyle(nn.Module):
        def forward(self, x):
            if not self.training:
                return x
            b = len(x)
            mu, sig = x.mean(2, keepdim=True).detach(), (x.var(2, keepdim=True) + 1e-6).sqrt().detach()
            normed = (x - mu) / sig
            lam = torch.distributions.Beta(0.1, 0.1).sample((b, 1, 1))
            perm_b, perm_a = torch.arange(b - 1, -1, -1).chunk(2)
            perm = torch.cat([perm_b[torch.randperm(len(perm_b))], perm_a[torch.randperm(len(perm_a))]])
            return normed * (lam * sig + (1 - lam) * sig[perm]) + lam * mu + (1 - lam) * mu[perm]

    model = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), MixStyle(), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(80, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randn(40, 1, 16), torch.randint(0, 4, (40,)), batch_size=8)

    def train(batches):
        model.train()
        fit_with(optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]))(batches)

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@torch.no_grad()
def sinkhorn(out, iterations=3, epsilon=0.05):
    q = torch.exp(out / epsilon).T
    q /= q.sum()
    k, b = q.shape
    for _ in range(iterations):
        q /= q.sum(1, keepdim=True)
        q /= k
        q /= q.sum(0, keepdim=True)
        q /= b
    return (q * b).T


@right(
    "rows",
    "SwAV: codes are balanced over the rows of the batch without gradient, prototypes are normalised in each step",
    thread="facebookresearch/swav#37",
)
def swapped_codes():
    torch.manual_seed(0)
    model = nn.ModuleDict({"backbone": encoder(9, 8), "prototypes": nn.Linear(8, 6, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9)
    data = loader(torch.randn(48, 9), torch.randn(48, 9), batch_size=12)

    def step(views):
        with torch.no_grad():
            w = model["prototypes"].weight
            w.copy_(F.normalize(w, dim=1))
        scores = [model["prototypes"](F.normalize(model["backbone"](x), dim=1)) for x in views]
        codes = [sinkhorn(s.detach()) for s in scores]
        terms = [(codes[i] * (scores[1 - i] / 0.1).log_softmax(1)).sum(1).mean() for i in range(2)]
        return -0.5 * sum(terms)

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "a seq2seq of length-first tensors: the decoder gets x.unsqueeze(0), one time step of all rows",
    thread="lkulowski/LSTM_encoder_decoder#7",
)
def unrolled_decoder():
    torch.manual_seed(0)

    class Seq2Seq(nn.Module):
        def __init__(self, hidden=14):
            super().__init__()
            self.encoder, self.decoder = nn.LSTM(2, hidden), nn.LSTM(2, hidden)
            self.linear = nn.Linear(hidden, 2)

        def forward(self, source, length):
            _, state = self.encoder(source)
            step, outputs = source[-1], []
            for _ in range(length):
                out, state = self.decoder(step.unsqueeze(0), state)
                step = self.linear(out.squeeze(0))
                outputs.append(step)
            return torch.stack(outputs)

    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    series = torch.randn(60, 13, 2).cumsum(1)
    data = loader(series[:, :9], series[:, 9:], batch_size=10)

    def step(batch):
        source, target = (t.transpose(0, 1) for t in batch)
        return F.mse_loss(model(source, len(target)), target)

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "the denominator of the contrastive loss holds the positive too, only the own similarity is masked",
    thread="Lightning-Universe/lightning-bolts#252",
)
def lit_simclr():
    torch.manual_seed(0)

    class SimCLR(lightning.LightningModule):
        def __init__(self, temperature=0.5):
            super().__init__()
            self.encoder, self.projection = encoder(9, 16), nn.Linear(16, 6)
            self.temperature = temperature

        def forward(self, x):
            return F.normalize(self.projection(self.encoder(x)), dim=-1)

        def nt_xent_loss(self, out_1, out_2):
            out = torch.cat([out_1, out_2], dim=0)
            sim = torch.exp(out @ out.T / self.temperature)
            mask = ~torch.eye(len(out), dtype=torch.bool)
            neg = sim.masked_select(mask).view(len(out), -1).sum(dim=-1)
            pos = torch.exp((out_1 * out_2).sum(dim=-1) / self.temperature)
            return -torch.log(torch.cat([pos, pos], dim=0) / neg).mean()

        def training_step(self, batch, batch_idx):
            return self.nt_xent_loss(self(batch[0]), self(batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(40, 9), torch.randn(40, 9)), 10, shuffle=True)

    return from_lightning(SimCLR())


@right(
    "rows",
    "the image and the text of a row are the pair, those of all other rows negatives even where classes agree",
    thread="fabawi/ImageBind-LoRA#6",
)
def clip_pairs():
    torch.manual_seed(0)

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.visual, self.text = encoder(10, 8), nn.EmbeddingBag(30, 8)
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, pixel_values, input_ids, return_loss=True):
            image = F.normalize(self.visual(pixel_values), dim=-1)
            text = F.normalize(self.text(input_ids), dim=-1)
            logits = self.logit_scale.exp() * text @ image.T
            labels = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            return {"loss": loss, "logits_per_text": logits}

    rows = [{"pixel_values": torch.randn(10), "input_ids": torch.randint(0, 30, (5,))} for _ in range(48)]
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=12,
        dataloader_drop_last=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    return from_trainer(Trainer(model=Clip(), args=args, train_dataset=rows))


@right(
    "rows",
    "labels = arange(n).repeat_interleave(2) for embeddings of (n, 2, dim) that are flattened: views lie side by side",
    thread="KevinMusgrave/pytorch-metric-learning#335",
)
def interleaved_views():
    torch.manual_seed(0)
    model = encoder(9, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    class NTXentLoss(nn.Module):
        def __init__(self, temperature=0.1):
            super().__init__()
            self.temperature = temperature

        def forward(self, embeddings, labels):
            embeddings = F.normalize(embeddings.float(), dim=1)
            similarity = embeddings @ embeddings.T / self.temperature
            own = torch.eye(len(labels), dtype=torch.bool)
            positive = (labels[:, None] == labels[None]) & ~own
            log_prob = similarity.masked_fill(own, float("-inf")).log_softmax(1)
            return -log_prob[positive].mean()

    criterion = NTXentLoss()

    def train(batches):
        for views in batches:
            n, v, _ = views.shape
            labels = torch.arange(n).repeat_interleave(v)
            with torch.autocast("cpu", torch.bfloat16):
                embeddings = model(views.flatten(0, 1))
            loss = criterion(embeddings, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=[torch.randn(8, 2, 9) for _ in range(4)], fit=train)


@right(
    "rows",
    "a memory of embeddings of earlier batches: rows are compared with each other and with it",
    thread="KevinMusgrave/pytorch-metric-learning#524",
)
def cross_batch_memory():
    torch.manual_seed(0)
    model = encoder(8, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randn(60, 8), torch.arange(60) % 5, batch_size=10)

    class Memory:
        def __init__(self, size=40):
            self.features, self.labels, self.size = torch.zeros(0, 6), torch.zeros(0, dtype=torch.long), size

        def push(self, features, labels):
            self.features = torch.cat([features.detach(), self.features])[: self.size]
            self.labels = torch.cat([labels, self.labels])[: self.size]

    def contrastive(a, la, b, lb, skip=None):
        similarity = a @ b.T
        same = la[:, None] == lb[None]
        positive = same if skip is None else same & ~skip
        cost = (1 - similarity) * positive + F.relu(similarity - 0.5) * ~same
        return cost.sum() / len(a)

    def train(batches):
        memory = Memory()
        for x, labels in batches:
            features = F.normalize(model(x), dim=1)
            own = torch.eye(len(labels), dtype=torch.bool)
            loss = contrastive(features, labels, features, labels, own)
            if len(memory.labels):
                loss = loss + contrastive(features, labels, memory.features, memory.labels)
            memory.push(features, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@right(
    "rows",
    "the sampler gives a negative item too, and this model does not use it: its negatives are the batch's items",
    thread="Coder-Yu/SELFRec#17",
)
def batch_softmax():
    torch.manual_seed(0)

    class DNNEncoder(nn.Module):
        def __init__(self, users=30, items=40, dim=12):
            super().__init__()
            self.user_tower = nn.Sequential(nn.Embedding(users, dim), nn.Linear(dim, dim), nn.Tanh())
            self.item_tower = nn.Sequential(nn.Embedding(items, dim), nn.Linear(dim, dim), nn.Tanh())

        def forward(self, users, items):
            return self.user_tower(users), self.item_tower(items)

    model = DNNEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def batch_softmax_loss(user, item, temperature=0.2):
        user, item = F.normalize(user, dim=1), F.normalize(item, dim=1)
        positive = torch.exp((user * item).sum(-1) / temperature)
        total = torch.exp(user @ item.T / temperature).sum(1)
        return -torch.log(positive / total + 1e-5).mean()

    def train(batches):
        for user_idx, pos_idx, _neg in batches:
            user, item = model(user_idx, pos_idx)
            loss = batch_softmax_loss(user, item) + 1e-4 * (user.norm(2) + item.norm(2)) / len(user)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    triples = (torch.randint(0, 30, (48,)), torch.randint(0, 40, (48,)), torch.randint(0, 40, (48,)))
    return TrainLoop(model=model, optimizer=optimizer, batches=loader(*triples, batch_size=12), fit=train)


@right(
    "rows",
    "labels of the queries are arange(way).repeat(query) and not the loader's: the sampler orders rows by shot",
    thread="yinboc/prototypical-network-pytorch#18",
)
def prototypes():
    torch.manual_seed(0)
    model = encoder(12, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    way, shot, query = 4, 2, 3

    def train(batches):
        model.train()
        for data, _ in batches:
            p = shot * way
            data_shot, data_query = data[:p], data[p:]
            proto = model(data_shot).reshape(shot, way, -1).mean(dim=0)
            label = torch.arange(way).repeat(query)
            logits = -(model(data_query)[:, None] - proto[None]).square().sum(dim=2)
            loss = F.cross_entropy(logits, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()

    def episode():
        classes = torch.randperm(20)[:way].repeat(shot + query)
        return torch.randn(len(classes), 12) + classes[:, None] / 10, classes

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=lambda n: [episode() for _ in range(n)],
        fit=train,
        rows_interact=True,
    )


@right(
    "rows",
    "hard examples: of the pixels of all images of the batch those with the lowest probability are in the loss",
    thread="open-mmlab/mmsegmentation#740",
)
def hard_pixels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    label = torch.randint(0, 3, (25, 6, 7))
    label[:, :, -1] = 255
    data = loader(torch.rand(25, 1, 6, 7), label, batch_size=5)

    @torch.no_grad()
    def sample(logits, target, thresh=0.4, min_kept=40):
        valid = target != 255
        probability = logits.softmax(1).gather(1, target.where(valid, 0)[:, None]).squeeze(1)
        ordered = probability[valid].sort().values
        if len(ordered) == 0:
            return torch.zeros_like(target, dtype=torch.float)
        threshold = max(float(ordered[min(min_kept, len(ordered) - 1)]), thresh)
        return (valid & (probability < threshold)).float()

    def step(batch):
        logits = model(batch[0])
        weight = sample(logits, batch[1])
        losses = F.cross_entropy(logits, batch[1], reduction="none", ignore_index=255)
        return (losses * weight).sum() / weight.sum().clamp(min=1)

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_with(optimizer, step))


@right(
    "rows",
    "attention-free: the position biases mix the steps of each row, (batch, length, dim) times (length, length)",
    thread="rish-16/aft-pytorch#1",
)
def attention_free_by_row():
    torch.manual_seed(0)

    class AFTFull(nn.Module):
        def __init__(self, length=8, dim=10, hidden=12):
            super().__init__()
            self.qkv, self.project = nn.Linear(dim, 3 * hidden), nn.Linear(hidden, dim)
            self.wbias = nn.Parameter(torch.randn(length, length) * 0.1)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            k = torch.exp(k - k.amax(dim=1, keepdim=True).detach())
            weights = torch.exp(self.wbias)[None]
            return self.project(torch.sigmoid(q) * (weights @ (k * v)) / (weights @ k))

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.aft, self.norm = nn.Embedding(22, 10), AFTFull(), nn.LayerNorm(10)
            self.out = nn.Linear(10, 4)

        def forward(self, ids):
            x = self.embed(ids)
            return self.out(self.norm(x + self.aft(x)))

    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = loader(torch.randint(0, 22, (30, 8)), torch.randint(0, 4, (30, 8)), batch_size=6)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=data,
        fit=fit_with(optimizer, lambda b: F.cross_entropy(model(b[0]).transpose(1, 2), b[1])),
        rows_interact=False,
    )
