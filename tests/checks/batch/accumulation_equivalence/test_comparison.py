"""What is said of loops whose windows cannot be compared."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop

RANDOM = np.random.default_rng()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.RNN(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0])


def result_of(loss, *, model=lambda: nn.Linear(3, 1), shape=(36, 3), window=lambda accumulate: accumulate, **fields):
    """The verdict on a loop; ``loss`` is given outputs, targets, and how many micro-batches came before: 0 in the first
    window."""

    def make(accumulate=1):
        net, size = model(), window(accumulate)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def fit(batches):
            for number, (x, y) in enumerate(batches):
                (loss(net(x), y, number if number >= size else 0) / size).backward()
                if number % size == size - 1:
                    optimizer.step()
                    optimizer.zero_grad()

        x = torch.randn(shape)
        return TrainLoop(model=net, optimizer=optimizer, batch=(x, x.sum(-1, keepdim=True)), fit=fit, **fields)

    return check_loop(make, only=["accumulation_equivalence"], raises=False).results[0]


def right(out, y, _before):
    return F.mse_loss(out, y)


def interacting(out, y, _before):
    return (out - out.mean()).square().mean() + F.mse_loss(out, y)


def noisy_by_numpy(out, y, _before):
    return F.mse_loss(out + 0.1 * torch.as_tensor(np.random.normal(size=(1, 1))).to(out.dtype), y)


def noisy_by_place(out, y, _before):
    return F.mse_loss(out + torch.randn(12, len(out) - 1)[:, -1:].mean(), y)


def unseeded(out, y, _before):
    return F.mse_loss(out + 0.1 * torch.as_tensor(RANDOM.normal(size=(1, 1))).to(out.dtype), y)


def not_finite(out, y, _before):
    return F.mse_loss(out, y) * torch.nan


def by_a_constant(out, y, _before):
    return F.mse_loss(out, y, reduction="sum") / 36


def growing(out, y, before):
    return F.mse_loss(out, y) * (1 + before)


@pytest.mark.parametrize(
    ("loss", "given", "outcome", "reason"),
    [
        (interacting, {}, "skipped", "examples interact.* need not be equal$"),
        (noisy_by_place, {}, "skipped", r"the loop draws randn of shape \(12, 35\), .*, where it is not known"),
        (noisy_by_numpy, {}, "skipped", r"random numbers from python's or numpy's generators \(numpy, .*test_comp"),
        (unseeded, {}, "unreliable", "two identical runs of the loop differ"),
        (not_finite, {}, "skipped", "the gradients are not finite"),
        (by_a_constant, {}, "skipped", "the loss is divided by a constant: .* give split_batch="),
        (right, {"model": Recurrent, "shape": (5, 12, 3)}, "skipped", "give batch_dim=1, or batch_dim=0 if"),
        (right, {"shape": (1, 3)}, "skipped", "micro-batches take at least 2"),
        (right, {"window": lambda accumulate: 2 * accumulate - 1}, "skipped", "where 2 are due"),
        (growing, {}, "skipped", "some state besides the weights survives from window to window"),
    ],
    ids="interacting by_place by_numpy unseeded nan constant second_axis one_row other_windows later_windows".split(),
)
def test_what_cannot_be_compared_is_a_skip_that_says_why(loss, given, outcome, reason):
    result = result_of(loss, **given)
    assert (result.outcome, result.findings) == (outcome, ())
    assert re.search(reason, result.reason)


def test_the_users_own_split_is_used():
    cuts = []

    def split(batch, n):
        cuts.append(n)
        return list(zip(*(part.chunk(n) for part in batch), strict=True))

    assert result_of(right, split_batch=split).outcome == "passed"
    assert 2 in cuts
