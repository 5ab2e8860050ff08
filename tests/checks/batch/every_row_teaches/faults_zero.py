"""Losses that are exactly 0 from the start."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def preferred(rows=12, features=6):
    """Two items for each row, the first of which is preferred."""
    worse, _ = data.table(rows=rows, features=features)
    return {"chosen": worse + torch.linspace(0.2, 1.0, features), "rejected": worse}


class Scores(nn.Module):
    """A score between 0 and 1."""

    def __init__(self):
        super().__init__()
        self.body = mlp(6, 16, 1)

    def forward(self, x):
        return self.body(x).squeeze(-1).sigmoid()


def margin(loss_of):
    def loss(model, batch):
        return loss_of(model(batch["chosen"]), model(batch["rejected"]))

    return lambda: loop(Scores(), preferred(), loss)


def signs(loss_of):
    def loss(model, batch):
        x, y = batch
        return loss_of(0.3 * model(x).squeeze(-1).tanh(), 2.0 * y - 1)

    return lambda: loop(mlp(6, 16, 1), data.labelled(classes=2), loss)


pair(
    "margin_taken_off",
    "every_row_teaches",
    "hinge_never_active",
    culprits=("relu",),
    where="F.relu(rejected - chosen - 1.0)",
    change="F.relu(rejected - chosen - 1.0)",
    faulty=margin(lambda chosen, rejected: F.relu(rejected - chosen - 1.0).mean()),
    fixed=margin(lambda chosen, rejected: F.relu(rejected - chosen + 1.0).mean()),
    quick=True,
)


pair(
    "hinge_of_the_wrong_sign",
    "every_row_teaches",
    "hinge_never_active",
    culprits=("clamp",),
    where=".clamp(min=0)",
    faulty=signs(lambda score, sign: (sign * score - 1).clamp(min=0).mean()),
    fixed=signs(lambda score, sign: (1 - sign * score).clamp(min=0).mean()),
)


def weighted(weigh):
    def loss(model, batch):
        x, y = batch
        weights = weigh(torch.bincount(y, minlength=3))
        return (F.cross_entropy(model(x), y, reduction="none") * weights[y]).mean()

    return lambda: loop(mlp(6, 16, 3), data.labelled(), loss)


pair(
    "class_weights_by_an_integer_division",
    "every_row_teaches",
    "weights_cut_to_zero",
    where="* weights[y]).mean()",
    change="counts // counts.sum()",
    faulty=weighted(lambda counts: counts // counts.sum()),
    fixed=weighted(lambda counts: counts / counts.sum()),
    quick=True,
)
