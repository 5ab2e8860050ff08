"""Filters by name that are to freeze a part of the model, and match no parameter of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


class Tagger(nn.Module):
    """A text encoder, and a head on it."""

    def __init__(self):
        super().__init__()
        self.bert = nn.ModuleDict(
            {
                "embeddings": nn.ModuleDict({"word": nn.Embedding(16, 24), "position": nn.Embedding(12, 24)}),
                "encoder": nn.ModuleDict({"layer": nn.ModuleList(mlp(24, 24, 24) for _ in range(2))}),
                "final": nn.LayerNorm(24),
            }
        )
        self.classifier = nn.Linear(24, 16)

    def forward(self, ids):
        table = self.bert["embeddings"]
        x = table["word"](ids) + table["position"](torch.arange(ids.shape[1], device=ids.device))
        for layer in self.bert["encoder"]["layer"]:
            x = x + layer(x)
        return self.classifier(self.bert["final"](x))


def tagged(freeze, model_of=Tagger, wrap=lambda model: model):
    """A loop that freezes by ``freeze(model)`` and trains what is left."""

    def make():
        model = wrap(model_of())
        freeze(model)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)

        def fit(batches):
            for ids, tags in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(ids).flatten(0, 1), tags.flatten()).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(), fit=fit)

    return make


def two(name, **fields):
    pair(name, "frozen_stays_frozen", "freeze_matches_nothing", level="advice", **fields)


# The prefix of the encoder alone, in a model that holds the encoder.


def freeze_below(*prefixes):
    def freeze(model):
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes):
                parameter.requires_grad = False

    return freeze


two(
    "embeddings_of_an_encoder_within_a_model",
    culprits=("bert.embeddings.word.weight", "bert.embeddings.position.weight"),
    where="if name.startswith(prefixes)",
    faulty=tagged(freeze_below("embeddings.")),
    fixed=tagged(freeze_below("bert.embeddings.")),
    quick=True,
)


# A list of patterns of which one matches by luck; the others have a segment that this model's names do not.


def freeze_listed(patterns):
    def freeze(model):
        for name, parameter in model.named_parameters():
            if any(pattern in name for pattern in patterns):
                parameter.requires_grad_(False)

    return freeze


# A name of another model's part, in the only filter of the function.


two(
    "backbone_of_another_name",
    culprits=("bert", "classifier"),
    where="if name.startswith(prefixes)",
    faulty=tagged(freeze_below("backbone.")),
    fixed=tagged(freeze_below("bert.")),
)


# The names of a wrapped model, after the wrapper was taken off.


def freeze_exactly(model):
    frozen = [f"module.bert.embeddings.{table}.weight" for table in ("word", "position")]
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad = False


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, ids):
        return self.module(ids)


two(
    "names_of_the_wrapped_model",
    culprits=("bert.embeddings.word.weight",),
    where="if name in frozen",
    faulty=tagged(freeze_exactly),
    fixed=tagged(freeze_exactly, wrap=Wrapped),
)


# The names of a part, asked for as those of the whole model are.


def freeze_part(prefix):
    def freeze(model):
        for name, parameter in model.bert.named_parameters():
            if name.startswith(prefix):
                parameter.requires_grad = False

    return freeze


two(
    "whole_names_asked_of_a_part",
    culprits=("bert.embeddings.word.weight",),
    where="if name.startswith(prefix)",
    faulty=tagged(freeze_part("bert.embeddings.")),
    fixed=tagged(freeze_part("embeddings.")),
)
