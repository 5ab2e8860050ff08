"""Loops that keep things from step to step as they should, as projects wrote them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def blobs(n=64, width=12, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=g) * 1.5
    y = torch.randint(0, classes, (n,), generator=g)
    return centers[y] + torch.randn(n, width, generator=g), y


def loader(batch_size=8, width=12, classes=4, seed=1):
    return DataLoader(TensorDataset(*blobs(64, width, classes, seed)), batch_size=batch_size, shuffle=True)


@right("memory", "retain_graph=True for the first of two backward passes over one graph", thread="isds-neu/PeRCNN#3")
def two_backward_passes():
    trunk, heads = nn.Linear(12, 24), nn.ModuleList([nn.Linear(24, 4), nn.Linear(24, 12)])
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=3e-3)

    def train(batches):
        for x, y in batches:
            h = F.relu(trunk(x))
            optimizer.zero_grad()
            F.cross_entropy(heads[0](h), y).backward(retain_graph=True)
            nn.utils.clip_grad_norm_(trunk.parameters(), 1.0)
            (0.5 * F.mse_loss(heads[1](h), x)).backward()
            optimizer.step()

    return TrainLoop(model={"trunk": trunk, "heads": heads}, optimizer=optimizer, batches=loader(), fit=train)
