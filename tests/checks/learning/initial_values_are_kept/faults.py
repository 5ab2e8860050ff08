"""Initial values that a later initialisation replaces."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop


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
        model = Tagger(torch.randn(40, 8), load_last)
        batch = torch.randint(40, (12, 6)), torch.arange(12) % 3
        return loop(model, batch, cross_entropy, **declared)

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


def rare_foreground(model, batch):
    x, y = batch
    wanted = F.one_hot(y, 40).float()
    return F.binary_cross_entropy_with_logits(model(x), wanted, reduction="sum") / len(x)


def detector(prior_last):
    return lambda: loop(Detector(prior_last), data.labelled(), rare_foreground)


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
    return lambda: loop(model_of(), data.labelled(), cross_entropy)


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


def checkpoint(prefix):
    return {f"{prefix}{name}": value for name, value in nn.Sequential(nn.Linear(6, 16)).state_dict().items()}


class Finetuned(nn.Module):
    """Loads what it can of a checkpoint, whose keys have a prefix."""

    def __init__(self, prefix):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 16)), nn.Linear(16, 3)
        self.body.load_state_dict(checkpoint(prefix), strict=False)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


for prefix in ("module.", "model.encoder."):
    pair(
        f"checkpoint_with_keys_of_{prefix.split('.')[0]}",
        "initial_values_are_kept",
        "nothing_loaded",
        where="self.body.load_state_dict(checkpoint(prefix), strict=False)",
        faulty=supervised(lambda prefix=prefix: Finetuned(prefix)),
        fixed=supervised(lambda: Finetuned("")),
        quick=prefix == "module.",
    )
