"""The gradient is zero and the loss does not depend: dead units, a softmax or a norm over one entry."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data, plain
from tests.loops.lora import LoRALinear
from tests.loops.nets import mlp
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"


def loop(network, batch, loss, lr=5e-3):
    def make():
        model = network()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
        return plain.loop(model, batch(), loss, optimizer, loss=loss)

    return make


def regress(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def dead(name, culprits, broken, whole, batch, loss, *, broken_loss=None, level="fault", **options):
    pair(
        name,
        CHECK,
        "dead_activation",
        culprits=culprits,
        level=level,
        faulty=loop(broken, batch, broken_loss or loss, **options),
        fixed=loop(whole, batch, loss, **options),
    )


# A ReLU layer that no row of the data can reach, by its bias.


def with_bias(value):
    def build():
        model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
        nn.init.constant_(model[2].bias, value)
        return model

    return build


dead(
    "relu_dead_by_bias",
    ("0.weight", "2.weight", "2.bias"),
    with_bias(-100.0),
    with_bias(0.1),
    data.labelled,
    classify,
)


# A softmax over a single output.


class OneLogit(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(6, 24, 1)

    def forward(self, x):
        return self.body(x).squeeze(-1)


class OneProbability(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(6, 24, 1)

    def forward(self, x):
        return torch.softmax(self.body(x), dim=1).squeeze(-1)


def binary():
    x, labels = data.labelled(classes=2)
    return x, labels.to(x.dtype)


def bce_with_logits(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def brier(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


dead(
    "softmax_of_one_output",
    ("body.0.weight", "body.2.weight", "body.2.bias"),
    OneProbability,
    OneLogit,
    binary,
    bce_with_logits,
    broken_loss=brier,
)


# Both factors of an adapter start at zero.


class ZeroLoRA(LoRALinear):
    def __init__(self, base):
        super().__init__(base)
        nn.init.zeros_(self.lora_A)


def adapted(layer):
    def build():
        model = mlp(6, 24, 24, 1).requires_grad_(False)
        model[2] = layer(model[2])
        model[4].requires_grad_(True)
        return model

    return build


dead(
    "adapter_factors_both_zero",
    ("2.lora_A", "2.lora_B"),
    adapted(ZeroLoRA),
    adapted(LoRALinear),
    data.table,
    regress,
    lr=1e-2,
)
