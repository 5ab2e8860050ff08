"""Batches that hold more than rows: numbers of numpy, slots, lists, what stands at module level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.batch.accumulation_equivalence.unusual_accumulation import windows
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import points, tokens

IGNORED = -100
GRID = torch.linspace(-1.0, 1.0, 8)
AT_MODULE_LEVEL = (torch.linspace(-1.0, 1.0, 96).reshape(12, 8).sin(), torch.arange(12) % 4)


def unequal(rows=12, length=9):
    """Sequences whose ends are ignored, each at another place."""
    ids = tokens(rows, length)
    lengths = torch.randint(2, length + 1, (rows, 1))
    return ids, ids.masked_fill(torch.arange(length) >= lengths, IGNORED)


def language():
    return nn.Sequential(nn.Embedding(16, 12), nn.Linear(12, 16))


def summed(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(slots=True)
class Sentences:
    ids: torch.Tensor
    labels: torch.Tensor
    count: np.int64


@odd(notes="a dataclass with slots, whose count of tokens is a number of numpy")
def beside_count_of_numpy_in_slots(accumulate=1):
    model = language()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ids, labels = unequal()
    batch = Sentences(ids, labels, np.int64((labels != IGNORED).sum().item()))

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            count = sum(int(part.count) for part in window)
            for part in window:
                (summed(model, part.ids, part.labels) / count).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


@odd(notes="a temperature and a grid of positions stand beside the rows: neither is a count, neither is cut")
def beside_what_is_no_count(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = points(12)
    batch = {"x": x, "y": y, "grid": torch.linspace(0.0, 1.0, 8), "temperature": 0.5}

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for part in window:
                logits = model(part["x"] + part["grid"]) / part["temperature"]
                (F.cross_entropy(logits, part["y"]) / len(window)).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


@odd(notes="inputs are a list of tensors of unequal length, one for each row, and the targets are a plain list")
def beside_lists_of_rows(accumulate=1):
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clouds = [torch.randn(2 + i % 4, 5) for i in range(12)]
    batch = {"clouds": clouds, "labels": [i % 3 for i in range(12)]}

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for part in window:
                logits = torch.stack([model(cloud).mean(0) for cloud in part["clouds"]])
                (F.cross_entropy(logits, torch.tensor(part["labels"])) / len(window)).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


@odd(notes="batch and constants are tensors at module level, made once in float32")
def beside_constants_at_module_level(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def fit(batches):
        for window in windows(batches, accumulate):
            optimizer.zero_grad()
            for x, y in window:
                (F.cross_entropy(model(x * GRID), y) / len(window)).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=AT_MODULE_LEVEL, fit=fit)


@odd(notes="windows grow from one micro-batch to the knob's number in the first steps (a warm-up of the batch size)")
def beside_windows_that_grow(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        held, size = [], 1
        for batch in batches:
            held.append(batch)
            if len(held) == min(size, accumulate):
                optimizer.zero_grad()
                for x, y in held:
                    (F.cross_entropy(model(x), y) / len(held)).backward()
                optimizer.step()
                held, size = [], size + 1

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="the gradient of the window is brought to a fixed length before the step: its own length means nothing")
def beside_gradients_of_one_length(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for window in windows(batches, accumulate):
            for x, y in window:
                F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            for p in model.parameters():
                p.grad.mul_(1e3)
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="each micro-batch's gradient is clipped and noised by itself before it is added (DP-SGD by micro-batches)")
def beside_private_micro_batches(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for window in windows(batches, accumulate):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for x, y in window:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                for sum_, p in zip(total, model.parameters(), strict=True):
                    sum_.add_(p.grad)
            for sum_, p in zip(total, model.parameters(), strict=True):
                p.grad = sum_ / len(window) + 1e-3 * torch.randn_like(sum_)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)
