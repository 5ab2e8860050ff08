"""What the comparison of windows says where it cannot compare."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation
from pytest_trainloop.errors import CannotDecide, Unreliable
from pytest_trainloop.runs.evidence import Evidence

RANDOM = np.random.default_rng()


def evidence(loss=F.mse_loss, *, rows=12, window=lambda accumulate: accumulate, **fields):
    def make(accumulate=1):
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            count, size = 0, window(accumulate)
            for x, y in batches:
                (loss(model(x), y) / size).backward()
                count += 1
                if count == size:
                    optimizer.step()
                    optimizer.zero_grad()
                    count = 0

        x = torch.randn(rows, 3)
        batch = (x, x.sum(1, keepdim=True))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **fields)

    return Evidence(make, knobs={"accumulate": "accumulate"})


def interacting(out, y):
    return (out - out.mean()).square().mean() + F.mse_loss(out, y)


def noisy_by_numpy(out, y):
    return F.mse_loss(out + 0.1 * torch.as_tensor(np.random.normal(size=(1, 1))).to(out.dtype), y)


def noisy_by_place(out, y):
    return F.mse_loss(out + torch.randn(12, len(out) - 1)[:, -1:].mean(), y)


def unseeded(out, y):
    return F.mse_loss(out + 0.1 * torch.as_tensor(RANDOM.normal(size=(1, 1))).to(out.dtype), y)


def test_rows_decide_the_sizes():
    assert evidence(rows=3).shared(Accumulation.of).sizes() == [2, 3]
    with pytest.raises(CannotDecide, match="micro-batches take at least 2"):
        evidence(rows=1).shared(Accumulation.of)


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (interacting, CannotDecide, "examples interact.* need not be equal$"),
        (noisy_by_place, CannotDecide, r"the loop draws randn of shape \(12, 35\), .*, where it is not known"),
        (
            noisy_by_numpy,
            CannotDecide,
            r"draws random numbers from python's or numpy's generators \(numpy, .*test_comparison",
        ),
        (unseeded, Unreliable, "two identical runs of the loop differ"),
    ],
)
def test_what_is_not_meant_to_be_equal_is_skipped(loss, error, words):
    made = evidence(loss, rows=36).shared(Accumulation.of)
    split = made.split(2)
    assert not split.equal
    with pytest.raises(error, match=words):
        made.weigh(split)


def test_a_loop_that_counts_its_windows_in_another_way():
    with pytest.raises(CannotDecide, match="where 2 are due"):
        evidence(window=lambda accumulate: 2 * accumulate - 1).shared(Accumulation.of).split(3)


def test_the_users_own_split_is_used():
    cuts = []

    def split(batch, n):
        cuts.append(n)
        return list(zip(*(part.chunk(n) for part in batch), strict=True))

    assert evidence(split_batch=split).shared(Accumulation.of).split(2).equal
    assert set(cuts) == {2}
