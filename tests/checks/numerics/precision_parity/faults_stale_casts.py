"""One autocast block around several updates of the weights: their casts are kept from before."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def mlp():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


# The block is put around the epoch, not around the forward pass.


def train_epoch(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def train_epoch_by_forward(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def epoch(inside):
    def make():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def fit(batches):
            if inside:
                train_epoch_by_forward(model, optimizer, batches)
                return
            with autocast():
                train_epoch(model, optimizer, batches)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "autocast_around_the_epoch",
    "precision_parity",
    "weights_cast_once",
    faulty=epoch(inside=False),
    fixed=epoch(inside=True),
    where="optimizer.step()",
    change="with autocast():",
    quick=True,
)


# Sharpness-aware steps: the second gradient is meant to be taken at the raised weights.


@torch.no_grad()
def raised(model, rho):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    moves = [rho * p.grad / norm for p in model.parameters()]
    for p, move in zip(model.parameters(), moves, strict=True):
        p.add_(move)
    return moves


@torch.no_grad()
def lowered(model, moves):
    for p, move in zip(model.parameters(), moves, strict=True):
        p.sub_(move)


def sharpness_aware(one_block):
    def make():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer, inner = (autocast, contextlib.nullcontext) if one_block else (contextlib.nullcontext, autocast)

        def fit(batches):
            for x, y in batches:
                with outer():
                    optimizer.zero_grad()
                    with inner():
                        first = F.cross_entropy(model(x), y)
                    first.backward()
                    moves = raised(model, 0.05)
                    optimizer.zero_grad()
                    with inner():
                        second = F.cross_entropy(model(x), y)
                    second.backward()
                    lowered(model, moves)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "autocast_around_both_passes_of_a_sharpness_aware_step",
    "precision_parity",
    "weights_cast_once",
    faulty=sharpness_aware(one_block=True),
    fixed=sharpness_aware(one_block=False),
    change="with outer():",
)
