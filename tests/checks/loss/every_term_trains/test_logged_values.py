"""A logged value of a network whose gradients are all zero is not a term that was left out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.frontends.api import check_loop
from tests.helpers.findings import described
from tests.loops.nets import mlp


class Rays(nn.Module):
    """A field of which all densities may be negative, where relu gives them a gradient of exactly 0."""

    def __init__(self, density=0.0):
        super().__init__()
        self.net = mlp(3, 16, 4)
        with torch.no_grad():
            [m for m in self.net.modules() if isinstance(m, nn.Linear)][-1].bias[3] = density

    def forward(self, rays):
        raw = self.net(rays)
        return (1 - torch.exp(-F.relu(raw[:, 3:]))) * torch.sigmoid(raw[:, :3])


def squared_error(x, y):
    return torch.mean((x - y) ** 2)


def decibels(error):
    return -10.0 * torch.log(error) / math.log(10.0)


def psnr_of_an_error_that_is_in_the_loss() -> TrainLoop:
    coarse, fine = Rays(), Rays(density=-5.0)
    optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=5e-4)

    def fit(batches):
        for rays, target in batches:
            error, error_0 = squared_error(fine(rays), target), squared_error(coarse(rays), target)
            optimizer.zero_grad()
            psnr = decibels(error)
            loss = error + error_0
            loss.backward()
            optimizer.step()
            assert psnr.item() < 1e3

    random = torch.Generator().manual_seed(0)
    batch = torch.rand(8, 3, generator=random), torch.rand(8, 3, generator=random)
    return TrainLoop(model={"coarse": coarse, "fine": fine}, optimizer=optimizer, batch=batch, fit=fit)


def test_the_psnr_of_an_error_that_is_in_the_loss_is_only_logged():
    """NeRF: the fine network is dead for this batch, which other checks name."""
    report = check_loop(psnr_of_an_error_that_is_in_the_loss, only=["every_term_trains"], raises=False)
    assert report.ok, described(report)
