"""Means over tokens taken for each micro-batch, where micro-batches hold unequal numbers of them."""

from __future__ import annotations

import torch
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

IGNORED = -100


def padded(rows: int = 8, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of unequal length: what follows their ends is ignored by the loss."""
    ids, targets = data.tokens(rows=rows, length=length)
    lengths = torch.tensor([length, 3, 7, 9, 5, length, 2, 8][:rows]).unsqueeze(1)
    beyond = torch.arange(length) >= lengths
    return ids.masked_fill(beyond, 0), targets.masked_fill(beyond, IGNORED)


def windows(batches, size):
    held = []
    for batch in batches:
        held.append(batch)
        if len(held) == size:
            yield held
            held = []
    if held:
        yield held


# One batch cut into parts by the step itself; padding is declared.


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.body = mlp(12, 24, 16)

    def forward(self, ids):
        return self.body(self.embed(ids))


def train_parts(model, optimizer, batches, accumulate, weigh):
    loss_of = nn.CrossEntropyLoss(ignore_index=IGNORED)
    for ids, tags in batches:
        optimizer.zero_grad()
        total = (tags != IGNORED).sum()
        for part, expected in zip(ids.chunk(accumulate), tags.chunk(accumulate), strict=True):
            loss = loss_of(model(part).flatten(0, 1), expected.flatten())
            share = (expected != IGNORED).sum() / total if weigh else 1 / accumulate
            (loss * share).backward()
        optimizer.step()


def tagger(weigh):
    def make(accumulate=1):
        model = Tagger()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=padded(),
            padding=Padding(ignore_index=IGNORED),
            fit=lambda batches: train_parts(model, optimizer, batches, accumulate, weigh),
        )

    return make


pair(
    "parts_of_a_batch_mean_of_means",
    "accumulation_equivalence",
    "mean_of_means",
    faulty=tagger(weigh=False),
    fixed=tagger(weigh=True),
)


# Targets that are not known are NaN, and left out of the mean.


def gaps(rows: int = 12, outputs: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Regression onto several outputs, of which each row knows between one and all."""
    x, _ = data.table(rows=rows)
    y = torch.sin(x[:, :outputs] * 2)
    known = torch.arange(outputs) <= (torch.arange(rows) * 3 % outputs).unsqueeze(1)
    return x, y.masked_fill(~known, float("nan"))


def train_known(model, optimizer, batches, accumulate, divide):
    for window in windows(batches, accumulate):
        optimizer.zero_grad()
        everything = sum(y.isfinite().sum() for _, y in window)
        for x, y in window:
            known = y.isfinite()
            squares = (model(x) - y.nan_to_num())[known].square()
            divide(squares, len(window), everything).backward()
        optimizer.step()


def several(divide):
    def make(accumulate=1):
        model = mlp(6, 24, 5)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=gaps(),
            fit=lambda batches: train_known(model, optimizer, batches, accumulate, divide),
        )

    return make


pair(
    "unknown_targets_mean_of_means",
    "accumulation_equivalence",
    "mean_of_means",
    faulty=several(lambda squares, count, _everything: squares.mean() / count),
    fixed=several(lambda squares, _count, everything: squares.sum() / everything),
    quick=True,
)
