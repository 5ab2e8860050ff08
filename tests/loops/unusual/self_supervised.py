"""Self-supervised learning: momentum encoders, queues, two views of one batch."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def view(x):
    return x + 0.2 * torch.randn_like(x)


def inputs():
    return points()[0]


class Encoder(nn.Module):
    def __init__(self, width=12, out=6):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, width), nn.ReLU())
        self.projector = nn.Linear(width, out)

    def forward(self, x):
        return self.projector(self.backbone(x))


def nt_xent(first, second, temperature=0.5):
    z = F.normalize(torch.cat([first, second]), dim=1)
    similarity = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    partner = torch.arange(len(z)).roll(len(first))
    return F.cross_entropy(similarity, partner)


def train_simclr(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        nt_xent(model(view(x)), model(view(x))).backward()
        optimizer.step()


@odd(notes="rows interact through the loss, logits hold -inf, and the loss stays far above 0 (SimCLR)")
def simclr() -> TrainLoop:
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=inputs(),
        batches=fresh(inputs),
        fit=lambda batches: train_simclr(model, optimizer, batches),
    )


class MoCo(nn.Module):
    def __init__(self, size=32, dim=6, momentum=0.9, temperature=0.2):
        super().__init__()
        self.query, self.key = Encoder(out=dim), Encoder(out=dim)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.momentum, self.temperature = momentum, temperature
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for kept, live in zip(self.key.parameters(), self.query.parameters(), strict=True):
            kept.data = kept.data * self.momentum + live.data * (1 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys):
        places = (int(self.pointer) + torch.arange(len(keys))) % self.queue.size(1)
        self.queue[:, places] = keys.T
        self.pointer[0] = (places[-1] + 1) % self.queue.size(1)

    def forward(self, first, second):
        q = F.normalize(self.query(first), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.key(second), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone()
        self.enqueue(k)
        return torch.cat([positive, negative], 1) / self.temperature


def train_moco(model, optimizer, batches):
    for x in batches:
        logits = model(view(x), view(x))
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(
    notes="half of the declared model is frozen, moves inside forward, and buffers carry rows over to later "
    "batches (MoCo)"
)
def moco_queue_and_momentum_encoder() -> TrainLoop:
    model = MoCo()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=inputs(),
        batches=fresh(inputs),
        fit=lambda batches: train_moco(model, optimizer, batches),
    )


def projector(width, out):
    return nn.Sequential(nn.Linear(width, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, out))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), projector(12, 6))
        self.predictor = projector(6, 6)
        self.target = copy.deepcopy(self.online)

    def forward(self, first, second):
        with torch.no_grad():
            aims = self.target(first), self.target(second)
        guesses = self.predictor(self.online(first)), self.predictor(self.online(second))
        return sum(
            2 - 2 * F.cosine_similarity(g, a.detach()).mean() for g, a in zip(guesses, reversed(aims), strict=True)
        )

    @torch.no_grad()
    def update_target(self, tau=0.95):
        for kept, live in zip(self.target.parameters(), self.online.parameters(), strict=True):
            kept.copy_(tau * kept + (1 - tau) * live)


def train_byol(model, optimizer, batches):
    for x in batches:
        loss = model(view(x), view(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_target()


@odd(notes="the target is a submodule that requires grad and is held by nobody; biases stand before batch norm (BYOL)")
def byol() -> TrainLoop:
    model = BYOL()
    optimizer = torch.optim.Adam([*model.online.parameters(), *model.predictor.parameters()], lr=3e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=inputs(),
        fit=lambda batches: train_byol(model, optimizer, batches),
    )


@odd(
    notes="the optimizer was given the target network too, which never has a gradient and moves after each step (BYOL)"
)
def byol_target_in_optimizer() -> TrainLoop:
    model = BYOL()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=inputs(),
        batches=fresh(inputs),
        fit=lambda batches: train_byol(model, optimizer, batches),
    )


class MaskedAutoencoder(nn.Module):
    def __init__(self, patches=8, width=10):
        super().__init__()
        self.embed, self.encoder = nn.Linear(2, width), mlp(width, width, width, activation=nn.GELU)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.register_buffer("position", torch.randn(patches, width))
        self.mix, self.decoder = nn.Linear(patches, patches), nn.Linear(width, 2)

    def forward(self, x, keep=3):
        order = torch.rand(x.shape[:2]).argsort(1)
        kept = order[:, :keep]
        rows = torch.arange(len(x))[:, None]
        h = self.mask_token.repeat(*x.shape[:2], 1)
        h[rows, kept] = self.encoder(self.embed(x[rows, kept]) + self.position[kept])
        out = self.decoder(self.mix((h + self.position).transpose(1, 2)).transpose(1, 2))
        hidden = order[:, keep:]
        return F.mse_loss(out[rows, hidden], x[rows, hidden])


def train_mae(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


@odd(
    notes="each step sees another random third of its input, written in place into a mask token; "
    "forward returns the loss (MAE)"
)
def masked_autoencoder() -> TrainLoop:
    model = MaskedAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=torch.randn(6, 8, 2).cumsum(1) / 3,
        fit=lambda batches: train_mae(model, optimizer, batches),
    )
