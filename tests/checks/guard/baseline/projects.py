"""A small project whose parts a refactor replaces: one model, one loop, and what each of them is made of."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data

VOCAB, WIDTH, HEADS = 16, 12, 2


class Attention(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def heads(self, x):
        rows, length, width = x.shape
        return x.view(rows, length, HEADS, width // HEADS).transpose(1, 2)

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        mixed = self.mix(self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x)))
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, attention=Attention, norm=nn.LayerNorm, dropout=0.0):
        super().__init__()
        self.norm1 = norm(WIDTH)
        self.attention = attention()
        self.norm2 = norm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def mlp(self, x):
        return self.fc2(self.dropout(F.gelu(self.fc1(x))))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.block(self.embed(ids))))


class Pictures(nn.Module):
    """A bias before each batch norm, whose gradient is rounding and nothing else."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6, momentum=momentum)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Table(nn.Module):
    def __init__(self, width=10, activation=F.relu):
        super().__init__()
        self.fc1 = nn.Linear(6, width)
        self.fc2 = nn.Linear(width, 3)
        self.activation = activation

    def forward(self, x):
        return self.fc2(self.activation(self.fc1(x)))


def token_loss(scores, targets):
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def train(model, optimizer, batches, criterion=token_loss, scheduler=None):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


adamw = functools.partial(torch.optim.AdamW, lr=3e-3)


def project(
    model=Decoder,
    optimizer=lambda model: adamw(model.parameters()),
    fit=train,
    batch=data.tokens,
    scheduler=None,
    **options,
):
    """The function that a test would be, of these parts."""

    def make():
        net = model()
        own = optimizer(net)
        schedule = {} if scheduler is None else {"scheduler": scheduler(own)}
        return TrainLoop(
            model=net,
            optimizer=own,
            batch=batch(),
            fit=lambda batches: fit(net, own, batches, **options, **schedule),
            **schedule,
        )

    return make


decoder = project


def pictures(model=Pictures, **options):
    return project(model, batch=data.images, criterion=F.cross_entropy, **options)


def table(model=Table, **options):
    return project(model, **{"batch": data.labelled, "criterion": F.cross_entropy, **options})
