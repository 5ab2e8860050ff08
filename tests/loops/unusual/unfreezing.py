"""Parameters that are frozen for a while: schedules of requires_grad, groups and modes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 12)
        self.body = relu_mlp(12, 12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(torch.relu(self.body(torch.relu(self.stem(x)))))


def train_batch(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train_gradual(model, optimizer, batches, every=4):
    stages = [model.body, model.stem]
    for step, (x, y) in enumerate(batches, 1):
        train_batch(model, optimizer, x, y)
        if step % every == 0 and stages:
            stage = stages.pop(0).requires_grad_(True)
            optimizer.add_param_group({"params": stage.parameters(), "lr": optimizer.param_groups[-1]["lr"] / 2})


@odd(notes="layers are unfrozen one by one and enter the optimizer only then (gradual unfreezing)")
def gradual_unfreezing_by_param_groups() -> TrainLoop:
    model = Classifier()
    model.requires_grad_(False).head.requires_grad_(True)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=2e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_gradual(model, optimizer, batches),
    )


def train_two_phases(model, batches):
    model.requires_grad_(False).head.requires_grad_(True)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=2e-2)
    for epoch in range(2):
        if epoch == 1:
            model.requires_grad_(True)
            optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for x, y in batches:
            train_batch(model, optimizer, x, y)


@odd(
    notes="freezing happens inside fit; the second epoch thaws all with a new optimizer, should there be a second epoch"
)
def two_phases_with_new_optimizer() -> TrainLoop:
    model = Classifier()
    return TrainLoop(
        model=model, batch=points(), batches=fresh(points), fit=lambda batches: train_two_phases(model, batches)
    )


def train_freeze_out(model, optimizer, batches, freeze_after=6):
    for step, (x, y) in enumerate(batches):
        if step == freeze_after:
            model.stem.requires_grad_(False)
        train_batch(model, optimizer, x, y)


@odd(notes="the first layer stops training after a few steps and stays in the optimizer (FreezeOut)")
def early_layers_frozen_later() -> TrainLoop:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_freeze_out(model, optimizer, batches),
    )


def train_alternating_blocks(model, optimizer, batches):
    blocks = [model.stem, model.body, model.head]
    for step, (x, y) in enumerate(batches):
        for i, block in enumerate(blocks):
            block.requires_grad_(i == step % len(blocks))
        train_batch(model, optimizer, x, y)


@odd(notes="only one block has gradients at a time, in turn (block coordinate descent, LISA, BAdam)")
def block_coordinate_descent() -> TrainLoop:
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_alternating_blocks(model, optimizer, batches),
    )


class Pruner:
    """Magnitude pruning with masks that are applied again after each step."""

    def __init__(self, model, share=0.5):
        self.weights = [p for p in model.parameters() if p.ndim > 1]
        self.masks = [(p.abs() >= p.abs().flatten().quantile(share)).to(p.dtype) for p in self.weights]

    @torch.no_grad()
    def apply(self):
        for p, mask in zip(self.weights, self.masks, strict=True):
            p.mul_(mask)


def train_pruned(model, optimizer, batches, prune_at=4):
    pruner = None
    for step, (x, y) in enumerate(batches):
        if step == prune_at:
            pruner = Pruner(model)
            pruner.apply()
        train_batch(model, optimizer, x, y)
        if pruner is not None:
            pruner.apply()


@odd(notes="half of the weights are set back to 0 after every step though they have gradients (magnitude pruning)")
def magnitude_pruning_with_masks() -> TrainLoop:
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_pruned(model, optimizer, batches),
    )


@odd(notes="every weight row is rescaled to norm 1 after each step, so part of every update is undone (nGPT)")
def weights_normalised_after_each_step() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    scale = nn.Parameter(torch.full((), 4.0))
    model.register_parameter("scale", scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(scale * model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for layer in (model[0], model[2]):
                    layer.weight.copy_(F.normalize(layer.weight, dim=1))

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


def train_nmf(dictionary, codes, optimizer, batches):
    for rows, x in batches:
        optimizer.zero_grad()
        F.mse_loss(codes(rows) @ dictionary.weight.T, x).backward()
        optimizer.step()
        with torch.no_grad():
            for p in (dictionary.weight, codes.weight):
                p.clamp_(min=0.0)


@odd(notes="parameters are projected onto the non-negative after each step; a module is used only for its weight")
def nonnegative_factorisation() -> TrainLoop:
    model = nn.ModuleDict({"dictionary": nn.Linear(4, 8, bias=False), "codes": nn.Embedding(8, 4)})
    with torch.no_grad():
        for p in model.parameters():
            p.abs_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(torch.randperm(8), torch.rand(8, 8)),
        fit=lambda batches: train_nmf(model["dictionary"], model["codes"], optimizer, batches),
    )
