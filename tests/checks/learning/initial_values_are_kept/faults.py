"""Initial values that a later initialisation replaces."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.05)
        nn.init.zeros_(module.bias)


class Tagger(nn.Module):
    """A mean of word vectors, as in the projects that load GloVe."""

    def __init__(self, vectors, load_last):
        super().__init__()
        self.embedding, self.head = nn.Embedding(*vectors.shape), nn.Linear(vectors.shape[1], 3)
        if load_last:
            self.init_weights()
        self.embedding.weight.data.copy_(vectors)
        if not load_last:
            self.init_weights()

    def init_weights(self):
        self.embedding.weight.data.uniform_(-0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        self.head.weight.data.uniform_(-0.1, 0.1)

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(1))


def tagger(load_last, **declared):
    def make():
        vectors = torch.randn(40, 8)
        model = Tagger(vectors, load_last)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for ids, tags in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(ids), tags).backward()
                optimizer.step()

        batch = torch.randint(40, (12, 6)), torch.arange(12) % 3
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **declared)

    return make


class Detector(nn.Module):
    """A rare foreground: the last bias begins at a prior of one percent."""

    def __init__(self, prior_last):
        super().__init__()
        self.body, self.score = nn.Linear(6, 16), nn.Linear(16, 40)
        if prior_last:
            self.apply(initialise)
        nn.init.constant_(self.score.bias, -math.log(99))
        if not prior_last:
            self.apply(initialise)

    def forward(self, x):
        return self.score(torch.tanh(self.body(x)))


def detector(prior_last):
    def make():
        model = Detector(prior_last)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                wanted = F.one_hot(y, 40).float()
                F.binary_cross_entropy_with_logits(model(x), wanted, reduction="sum").div(len(x)).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


class Residual(nn.Module):
    def __init__(self, zeros_last):
        super().__init__()
        self.stem, self.branch, self.out, self.head = (
            nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3),
        )  # fmt: skip
        if zeros_last:
            self.apply(initialise)
        nn.init.zeros_(self.out.weight)
        if not zeros_last:
            self.apply(initialise)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return self.head(x + self.out(torch.tanh(self.branch(x))))


def supervised(model_of):
    def make():
        model = model_of()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "word_vectors_drawn_over",
    "initial_values_are_kept",
    "loaded_values_overwritten",
    culprits=("embedding.weight",),
    faulty=tagger(load_last=False, pretrained=("embedding",)),
    fixed=tagger(load_last=True, pretrained=("embedding",)),
    quick=True,
)

pair(
    "word_vectors_drawn_over_undeclared",
    "initial_values_are_kept",
    "loaded_values_overwritten",
    culprits=("embedding.weight",),
    level="advice",
    faulty=tagger(load_last=False),
    fixed=tagger(load_last=True),
)

pair(
    "prior_bias_set_before_the_initialisation",
    "initial_values_are_kept",
    "set_values_overwritten",
    culprits=("score.bias",),
    faulty=detector(prior_last=False),
    fixed=detector(prior_last=True),
    quick=True,
)

pair(
    "zeros_of_a_branch_drawn_over",
    "initial_values_are_kept",
    "set_values_overwritten",
    culprits=("out.weight",),
    level="advice",
    faulty=supervised(lambda: Residual(zeros_last=False)),
    fixed=supervised(lambda: Residual(zeros_last=True)),
)
