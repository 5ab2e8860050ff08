"""Rows that cost, or are read, and teach nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def classes(cost, signed):
    def loss(model, batch):
        x, y = batch["features"], batch["label"]
        return cost(model(x).squeeze(-1), 2.0 * y - 1 if signed else y).mean()

    def make():
        x, y = data.labelled(classes=2)
        return loop(mlp(6, 16, 1), {"features": x, "label": y}, loss)

    return make


def hinge(score, sign):
    return (1 - sign * score).clamp(min=0)


def logistic(score, sign):
    return F.softplus(-sign * score)


def squared_hinge(score, sign):
    return torch.relu(1 - sign * score) ** 2


pair(
    "logistic_loss_on_labels_of_0_and_1",
    "every_row_teaches",
    "class_costs_a_constant",
    culprits=("label",),
    where="sign * score",
    faulty=classes(logistic, signed=False),
    fixed=classes(logistic, signed=True),
    quick=True,
)
for name, cost in (
    ("hinge_on_labels_of_0_and_1", hinge),
    ("squared_hinge_on_labels_of_0_and_1", squared_hinge),
):
    pair(
        name,
        "loss_formula",
        "labels_as_signs",
        culprits=("label",),
        faulty=classes(cost, signed=False),
        fixed=classes(cost, signed=True),
    )


def labelled_rows(loss_of, rows=16):
    return lambda: loop(mlp(6, 16, 3), data.labelled(rows=rows), loss_of)


def all_but_the_last(model, batch):
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits[:-1], y[:-1])


def everything(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


pair(
    "last_row_cut_off",
    "every_row_teaches",
    "rows_left_out",
    culprits=("batch",),
    where="F.cross_entropy(logits[:-1], y[:-1])",
    change="F.cross_entropy(logits[:-1], y[:-1])",
    faulty=labelled_rows(all_but_the_last),
    fixed=labelled_rows(everything),
    quick=True,
)


@dataclass
class Texts:
    input_ids: torch.Tensor
    labels: torch.Tensor


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 12), nn.Linear(12, 3)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids).mean(1))


def texts():
    ids, _ = data.tokens(rows=8, length=9, vocab=20)
    return Texts(ids, ids[:, 0] % 3)


def of_one_row(model, batch):
    logits = model(batch.input_ids)[0]  # meant to unpack a tuple
    return F.cross_entropy(logits[None], batch.labels[:1])


def of_texts(model, batch):
    return F.cross_entropy(model(batch.input_ids), batch.labels)


pair(
    "first_row_taken_for_the_first_output",
    "every_row_teaches",
    "rows_left_out",
    where="model(batch.input_ids)[0]",
    faulty=lambda: loop(Classifier(), texts(), of_one_row),
    fixed=lambda: loop(Classifier(), texts(), of_texts),
)


def cox(as_mask):
    def loss(model, batch):
        x, time, event = batch
        order = torch.argsort(time)
        risk, event = model(x).squeeze(-1)[order], event[order]
        share = risk - torch.logcumsumexp(risk.flip(0), 0).flip(0)
        return -share[event.bool() if as_mask else event].mean()

    def make():
        x, y = data.table()
        return loop(mlp(6, 16, 1), (x, y.squeeze(-1).exp(), (torch.arange(16) % 3 > 0).long()), loss)

    return make


pair(
    "events_index_the_rows_as_positions",
    "every_row_teaches",
    "flags_as_indices",
    culprits=("batch[2]",),
    where="share[event.bool() if as_mask else event]",
    faulty=cox(as_mask=False),
    fixed=cox(as_mask=True),
    quick=True,
)
