"""Dropout that acts in evaluations, since nothing ties it to the mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


def validated(model_of, batch, held_out, loss_of):
    """A loop over epochs with a validation after each, in evaluation mode."""

    def make():
        model = model_of()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        history = []

        def validate():
            model.eval()
            with torch.no_grad():
                history.append(loss_of(model, held_out).item())
            model.train()

        def fit(batches):
            for _ in range(4):
                for examples in batches:
                    optimizer.zero_grad()
                    loss_of(model, examples).backward()
                    optimizer.step()
                validate()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit)

    return make


def classified(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


# A graph convolution after the papers' code, without `training=`.


class GCN(nn.Module):
    def __init__(self, nodes=16):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        ring = torch.eye(nodes) + torch.eye(nodes).roll(1, 0) + torch.eye(nodes).roll(-1, 0)
        self.register_buffer("adjacency", ring / 3)


class AlwaysDropping(GCN):
    def forward(self, x):
        h = F.relu(self.adjacency @ self.first(x))
        h = F.dropout(h, 0.5)
        return self.adjacency @ self.second(h)


class DroppingByMode(GCN):
    def forward(self, x):
        h = F.relu(self.adjacency @ self.first(x))
        h = F.dropout(h, 0.5, training=self.training)
        return self.adjacency @ self.second(h)


def graph(model):
    return validated(model, data.labelled, data.labelled(seed=1), classified)


pair(
    "functional_dropout_without_training",
    "train_mode",
    "dropout_stays_on",
    where="h = F.dropout(h, 0.5)",
    culprits=("AlwaysDropping",),
    faulty=graph(AlwaysDropping),
    fixed=graph(DroppingByMode),
    quick=True,
)


# Attention whose share of dropout does not follow the mode.


class Attention(nn.Module):
    def __init__(self, by_mode, width=16, dropout=0.1):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.by_mode, self.dropout = by_mode, dropout

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.by_mode:
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.out(mixed)


class Decoder(nn.Module):
    def __init__(self, by_mode, vocab=16, width=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.layers = nn.ModuleList(Attention(by_mode, width) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def next_token(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def decoder(by_mode):
    return validated(lambda: Decoder(by_mode), data.tokens, data.tokens(seed=1), next_token)


pair(
    "attention_dropout_in_every_mode",
    "train_mode",
    "dropout_stays_on",
    where="dropout_p=self.dropout)",
    culprits=("layers.0",),
    faulty=decoder(by_mode=False),
    fixed=decoder(by_mode=True),
)


# A dropout module that `forward` makes anew, and one in a plain list.


def head(model):
    return validated(model, data.labelled, data.labelled(seed=1), classified)
