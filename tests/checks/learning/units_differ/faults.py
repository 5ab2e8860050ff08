"""Layers whose units are copies of each other, and stay so."""

from __future__ import annotations

import torch
from torch import nn

from tests.loops import data, plain
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def loop(prepare, model_of=lambda: mlp(6, 16, 3), optimizer_of=torch.optim.Adam, rate=0.05):
    def make():
        model = model_of()
        with torch.no_grad():
            prepare(model)
        optimizer = optimizer_of(model.parameters(), lr=rate)
        return plain.loop(model, data.labelled(), plain.cross_entropy, optimizer)

    return make


def constant(model):
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)


def drawn(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


def widened(noise):
    """Net2Net: the 16 units of a trained layer twice, and half of the weight behind each."""

    def prepare(model):
        narrow = mlp(6, 16, 3)
        for new, old in ((model[0].weight, narrow[0].weight), (model[0].bias, narrow[0].bias)):
            new.copy_(torch.cat([old, old]))
        model[2].weight.copy_(torch.cat([narrow[2].weight, narrow[2].weight], dim=1) / 2)
        model[2].bias.copy_(narrow[2].bias)
        for layer in (model[0], model[2]):
            layer.weight += noise * layer.weight.std() * torch.randn_like(layer.weight)

    return prepare


pair(
    "every_parameter_at_a_tenth",
    "units_differ",
    "all_units_alike",
    culprits=("0.weight",),
    faulty=loop(constant),
    fixed=loop(drawn),
    quick=True,
)

pair(
    "widened_without_noise",
    "units_differ",
    "units_repeated",
    culprits=("0.weight",),
    level="advice",
    faulty=loop(widened(0.0), lambda: mlp(6, 32, 3)),
    fixed=loop(widened(0.05), lambda: mlp(6, 32, 3)),
    quick=True,
)
