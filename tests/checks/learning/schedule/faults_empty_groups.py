"""Groups with a learning rate of their own that hold nothing: the filter by name does not fit the model's names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


class Net(nn.Module):
    def __init__(self, backbone="backbone"):
        super().__init__()
        self.parts = nn.ModuleDict({backbone: mlp(6, 24, 24), "neck": nn.Linear(24, 16), "head": nn.Linear(16, 3)})

    def forward(self, x):
        *body, head = self.parts.values()
        for part in body:
            x = torch.tanh(part(x))
        return head(x)


class Policy(nn.Module):
    """Holds the net, so that the names of all parameters begin with ``model.``"""

    def __init__(self, net):
        super().__init__()
        self.model = net.parts
        self.net = [net]

    def forward(self, x):
        return self.net[0](x)


def trained(groups_of, model_of=lambda: Policy(Net())):
    def make():
        model = model_of()
        optimizer = torch.optim.AdamW(groups_of(model), lr=3e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


def two(name, **fields):
    pair(name, "schedule", "group_left_empty", level="advice", **fields)


# A policy whose net is an attribute: the names of the backbone do not begin with "backbone".


def by_prefix(prefix):
    def groups(model):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return [
            {"params": [p for name, p in named if not name.startswith(prefix)]},
            {"params": [p for name, p in named if name.startswith(prefix)], "lr": 1e-4},
        ]

    return groups


two(
    "backbone_of_a_policy",
    culprits=("model.backbone.0.weight",),
    where="name.startswith(prefix)",
    mentions=("0.0001",),
    faulty=trained(by_prefix("backbone")),
    fixed=trained(by_prefix("model.backbone")),
    quick=True,
)


# The name of a part in another spelling.


def by_part(part, rate):
    def groups(model):
        slow, rest = [], []
        for name, parameter in model.named_parameters():
            (slow if part in name else rest).append(parameter)
        return [{"params": rest}, {"params": slow, "lr": rate}]

    return groups


two(
    "backbone_in_another_spelling",
    culprits=("model.BackBone.0.weight",),
    where="if part in name",
    faulty=trained(by_part("backbone", 3e-4), lambda: Policy(Net("BackBone"))),
    fixed=trained(by_part("BackBone", 3e-4), lambda: Policy(Net("BackBone"))),
)
