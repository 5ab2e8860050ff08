"""Micro-batches that are left over and added to the first step of the next pass or call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def train_one_epoch(model, optimizer, batches, accumulate, *, last_too):
    for i, (x, y) in enumerate(batches, start=1):
        size = min(accumulate, len(batches) - (i - 1) // accumulate * accumulate) if last_too else accumulate
        (F.cross_entropy(model(x), y) / size).backward()
        if i % accumulate == 0 or (last_too and i == len(batches)):
            clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()


# The project's own loader gives ten batches, and the loop steps with every fourth.


def by_loader(**how):
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        loader = DataLoader(TensorDataset(*data.labelled(rows=80)), batch_size=8)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=loader,
            fit=lambda batches: train_one_epoch(model, optimizer, batches, 4, **how),
        )

    return make


pair(
    "ten_batches_in_windows_of_four",
    "step_order",
    "leaks_into_next",
    where="(F.cross_entropy(model(x), y) / size).backward()",
    culprits=("optimizer.step()",),
    quick=True,
    faulty=by_loader(last_too=False),
    fixed=by_loader(last_too=True),
)


# Epochs inside of fit: the leftover of one goes into the first step of the next.


def epochs_inside(*, whole):
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def fit(batches):
            counted = 0
            for _ in range(3):
                for i, (x, y) in enumerate(batches, start=1):
                    counted += 1
                    (F.cross_entropy(model(x), y) / 5).backward()
                    if (counted if whole else i) % 5 == 0:
                        optimizer.step()
                        optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "epoch_leftovers_added_to_next_epoch",
    "step_order",
    "leaks_into_next",
    level="advice",
    where="(F.cross_entropy(model(x), y) / 5).backward()",
    faulty=epochs_inside(whole=False),
    fixed=epochs_inside(whole=True),
)
