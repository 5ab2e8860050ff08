"""Loops that draw much, and the same each time."""

from __future__ import annotations

import random
import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def plain(model, optimizer, loss_of):
    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()

    return fit


@odd(notes="python's, numpy's and torch's generators all draw, at every step and at the building")
def repeatable_with_three_generators():
    model = relu_mlp(8, 16 + 2 * random.randrange(2), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_of(batch):
        x, y = batch
        x = x + random.gauss(0, 0.05) + torch.as_tensor(np.random.normal(scale=0.05, size=x.shape)).to(x.dtype)
        return F.mse_loss(model(x + 0.05 * torch.randn_like(x)), y)

    return TrainLoop(model=model, optimizer=optimizer, batch=curves(), fit=plain(model, optimizer, loss_of))


@odd(notes="generators of the project's own, seeded inside the function")
def repeatable_with_own_generators():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch_own, numpy_own, python_own = torch.Generator().manual_seed(5), np.random.default_rng(6), random.Random(7)

    def loss_of(batch):
        x, y = batch
        rows = torch.as_tensor(numpy_own.permutation(len(x)))[: python_own.randrange(4, len(x))]
        return F.cross_entropy(model(x[rows] + 0.1 * torch.randn(x[rows].shape, generator=torch_own)), y[rows])

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=plain(model, optimizer, loss_of))


class Prefetched:
    """Draws the batches in a thread beside the training."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        held = []
        worker = threading.Thread(target=lambda: held.extend(self.batches))
        worker.start()
        worker.join()
        return iter(held)


@odd(notes="a thread reads the batches; what it reads does not depend on when it runs")
def repeatable_with_a_thread():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    fit = plain(model, optimizer, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: fit(Prefetched(batches)),
    )


@odd(notes="the seed is set inside fit, at every step, to the number of the step")
def repeatable_seeded_at_every_step():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for i, (x, y) in enumerate(batches):
            torch.manual_seed(i)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="runs differ on purpose, and the loop says so", fixed_seed_ok=True)
def unrepeatable_and_declared():
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = np.random.default_rng()

    def loss_of(batch):
        x, y = batch
        return F.mse_loss(model(x + torch.as_tensor(generator.normal(scale=0.01, size=x.shape)).to(x.dtype)), y)

    return TrainLoop(
        model=model, optimizer=optimizer, batch=curves(), fit=plain(model, optimizer, loss_of), nondeterministic=True
    )


@odd(notes="the rate follows the clock of the steps, dictionaries and sets of numbers are walked in their order")
def repeatable_in_sets_and_dicts():
    model = nn.ModuleDict({name: relu_mlp(8, 8, 1) for name in ("c", "a", "b")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def loss_of(batch):
        x, y = batch
        chosen = {int(v) % 3 for v in y.abs().flatten() * 10}
        names = sorted(model)
        return torch.stack([F.mse_loss(model[names[i]](x), y) for i in sorted(chosen | {0, 1, 2})]).mean()

    return TrainLoop(model=model, optimizer=optimizer, batch=curves(), fit=plain(model, optimizer, loss_of))
