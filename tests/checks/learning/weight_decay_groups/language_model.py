"""A small language model whose norms and tables are named as each project likes, and its plain loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data

WIDTH, VOCAB = 16, 16


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class LayerNorm(nn.Module):
    """Without a bias, as in nanoGPT."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight)


class Model(nn.Module):
    """Named layers: a table, two norms around a small perceptron, a head."""

    def __init__(self, norm=nn.LayerNorm, names=("ln_1", "ln_f"), table="wte"):
        super().__init__()
        self.names, self.table = names, table
        self.add_module(table, nn.Embedding(VOCAB, WIDTH))
        nn.init.normal_(self.get_submodule(table).weight, std=0.1)
        for name in names:
            self.add_module(name, norm(WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        first, last = (self.get_submodule(name) for name in self.names)
        x = self.get_submodule(self.table)(ids)
        x = x + self.down(torch.tanh(self.up(first(x))))
        return self.head(last(x))


def lm_loss(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def train(model, optimizer, batches, penalty=lambda: 0.0):
    for batch in batches:
        optimizer.zero_grad()
        loss = lm_loss(model, batch) + penalty()
        loss.backward()
        optimizer.step()


def loop(configure, **given):
    """The loop of a model and of the optimizer that ``configure`` makes for it."""
    model = {key: given.pop(key) for key in ("norm", "names", "table") if key in given}

    def make():
        net = Model(**model)
        optimizer = configure(net)
        return TrainLoop(
            model=net,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(net, optimizer, batches),
            **given,
        )

    return make
