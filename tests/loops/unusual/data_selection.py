"""Loops that choose what to learn from: easy rows first, hard rows only, small inputs first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, images, points


def classifier(train, **extra):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda given: train(model, optimizer, given),
        **extra,
    )


def curriculum(model, optimizer, batches, start=3):
    for step, (x, y) in enumerate(batches):
        size = min(8, start + step)
        easy = x.flatten(1).std(1).argsort()[:size]
        optimizer.zero_grad()
        F.cross_entropy(model(x[easy]), y[easy]).backward()
        optimizer.step()


@odd(notes="the first steps use only the easiest rows of each batch (curriculum)")
def curriculum_over_rows() -> TrainLoop:
    return classifier(curriculum)


def small_steps_first(model, optimizer, batches):
    for step, (x, y) in enumerate(batches):
        size = 4 if step < 5 else 8
        optimizer.zero_grad()
        F.cross_entropy(model(F.interpolate(x, size=size)), y).backward()
        optimizer.step()


@odd(notes="the input's size changes during training (progressive resizing)")
def progressive_resizing() -> TrainLoop:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=images(),
        fit=lambda batches: small_steps_first(model, optimizer, batches),
    )


def hard_examples(model, optimizer, batches, keep=4):
    for x, y in batches:
        with torch.no_grad():
            hardest = F.cross_entropy(model(x), y, reduction="none").topk(min(keep, len(x))).indices
        optimizer.zero_grad()
        F.cross_entropy(model(x[hardest]), y[hardest]).backward()
        optimizer.step()


@odd(
    notes="a forward under no_grad chooses the rows with the largest loss; the others are never trained on in that step"
)
def online_hard_example_mining() -> TrainLoop:
    return classifier(hard_examples, batches=fresh(points))


def triplet_batch_hard(z, labels, margin=0.3):
    distance = torch.cdist(z, z)
    same = labels[:, None] == labels[None]
    furthest = distance.masked_fill(~same, 0.0).max(1).values
    nearest = distance.masked_fill(same, 1e9).min(1).values
    return F.relu(furthest - nearest + margin).mean()


def train_triplets(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        triplet_batch_hard(model(x), y).backward()
        optimizer.step()


def two_of_each():
    y = torch.arange(4).repeat_interleave(2)
    return 0.8 * torch.randn(8, 8) + torch.eye(4, 8)[y], y


@odd(
    notes="as soon as every triplet keeps its margin the loss and all gradients are exactly 0, and steps go on "
    "(batch-hard triplets)"
)
def triplets_until_nothing_is_left_to_learn() -> TrainLoop:
    model = relu_mlp(8, 16, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=two_of_each(),
        batches=fresh(two_of_each),
        fit=lambda batches: train_triplets(model, optimizer, batches),
    )


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        return self.linear(x).squeeze(1)


def train_perceptron(model, optimizer, batches):
    for x, y in batches:
        sign = torch.where(y < 2, 1.0, -1.0).to(x.dtype)
        loss = F.relu(-sign * model(x)).sum()
        if loss == 0:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(notes="no step at all for batches that are right already; the loss reaches exactly 0 (perceptron rule)")
def perceptron_steps_only_on_errors() -> TrainLoop:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(rows=12),
        batches=fresh(lambda: points(rows=12)),
        fit=lambda batches: train_perceptron(model, optimizer, batches),
    )
