"""Loops that see their data in a wrong order, twice, not at all, or with the labels of other rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
)

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


def table(rows=48, features=8, classes=4, seed=30):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=g)
    y = torch.randint(classes, (rows,), generator=g)
    return centres[y] + 0.5 * torch.randn(rows, features, generator=g), y


def mlp(features=8, classes=4):
    return nn.Sequential(nn.Linear(features, 24), nn.ReLU(), nn.Linear(24, classes))


def classifier_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@fault(
    "data_order",
    "the IterableDataset is not split over the workers: each of the two gives every row",
    thread="huggingface/datasets#3423",
    check="data_order",
)
def streamed_rows():
    class Stream(IterableDataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __iter__(self):
            for features, label in zip(self.x, self.y, strict=True):
                yield {"features": features, "label": label}

    loader = DataLoader(Stream(*table(rows=32)), batch_size=8, num_workers=2)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for batch in batches:
            classifier_step(model, optimizer, batch["features"], batch["label"])

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "the loader's last batch has one row, on which batch norm raises in training",
    thread="azavea/raster-vision#1029",
    check="data_order",
)
def batch_norm_classifier():
    loader = DataLoader(TensorDataset(*table(rows=33)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        model.train()
        for x, y in batches:
            classifier_step(model, optimizer, x, y)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)
