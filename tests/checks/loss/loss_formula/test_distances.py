"""Differences and products of what a layer gave and the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.checks.loss.loss_formula.distances import cancelling, growing, misaligned
from pytest_trainloop.loop import TrainLoop
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.tracing.loss_tape import Tapes


def step(loss_of, target=None):
    def make():
        net = nn.Conv1d(2, 3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                loss_of(net(x), y).backward()
                optimizer.step()

        batch = torch.randn(4, 2, 5), torch.randn(4, 3, 5) if target is None else target
        return TrainLoop(model=net, optimizer=optimizer, batch=batch, fit=fit)

    return Evidence(make).shared(Tapes.of).slices[0]


def last(t):
    return t.transpose(1, 2)


@pytest.mark.parametrize(
    ("loss_of", "wrong"),
    [
        (lambda p, t: F.mse_loss(p.reshape(-1), t.reshape(-1)), False),
        (lambda p, t: F.mse_loss(last(p).reshape(-1), last(t).reshape(-1)), False),
        (lambda p, t: F.mse_loss(last(p).reshape(-1), t.reshape(-1)), True),
        (lambda p, t: (last(p).reshape(4, 15) * t.flatten(1)).sum(), True),
        (lambda p, t: (p.reshape(4, 5, 3) - last(t)).square().mean(), True),
        (lambda p, t: (p - t).square().mean(), False),
        (lambda p, t: (p.flip(0) - t).square().mean(), False),
    ],
)
def test_entries_of_different_places(loss_of, wrong):
    assert bool(list(misaligned(step(loss_of)))) is wrong


@pytest.mark.parametrize(
    ("loss_of", "cancels"),
    [
        (lambda p, t: (p - t).mean() ** 2, True),
        (lambda p, t: (t - p).sum().abs(), True),
        (lambda p, t: (p - t).mean(), True),
        (lambda p, t: (p - t).abs().mean(), False),
        (lambda p, t: (p - t).mean() ** 2 + p.square().mean(), False),
        (lambda p, t: (p - t).mean((1, 2)).square().mean(), False),
    ],
)
def test_errors_that_cancel(loss_of, cancels):
    assert bool(list(cancelling(step(loss_of)))) is cancels


@pytest.mark.parametrize(
    ("loss_of", "grows"),
    [
        (lambda p, t: (p - t).abs().mean(), False),
        (lambda p, t: -(p - t).abs().mean(), True),
        (lambda p, t: torch.exp(-(p - t).square()).mean(), True),
        (lambda p, t: F.mse_loss(p, t) - 0.1 * (p - t).abs().mean(), False),
        (lambda p, t: F.relu(1 - (p - t).abs()).mean(), True),
    ],
)
def test_distances_that_grow(loss_of, grows):
    assert bool(list(growing(step(loss_of)))) is grows
