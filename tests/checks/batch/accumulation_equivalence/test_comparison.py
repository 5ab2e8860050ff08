"""What the comparison of windows says where it cannot compare, and in lower precision."""

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


def evidence(loss=F.mse_loss, *, rows=12, window=lambda accumulate: accumulate, divide=True, **fields):
    def make(accumulate=1):
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            count, size = 0, window(accumulate)
            for x, y in batches:
                (loss(model(x), y) / (size if divide else 1)).backward()
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


def noisy(out, y):
    return F.mse_loss(out + 0.1 * torch.randn_like(out), y)


def noisy_by_numpy(out, y):
    return F.mse_loss(out + 0.1 * torch.as_tensor(np.random.normal(size=(1, 1))).to(out.dtype), y)


def noisy_by_place(out, y):
    return F.mse_loss(out + torch.randn(12, len(out) - 1)[:, -1:].mean(), y)


def unseeded(out, y):
    return F.mse_loss(out + 0.1 * torch.as_tensor(RANDOM.normal(size=(1, 1))).to(out.dtype), y)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_right_loop_agrees_to_rounding(k):
    split = evidence().shared(Accumulation.of).split(k)
    assert split.equal
    assert split.precision == "float64"
    assert max(w.difference for w in split.windows) < 1e-14
    assert (split.steps, split.steps_expected, split.first_window, split.backwards) == (2, 2, k, k)


def test_the_weights_tell_what_was_not_divided():
    made = evidence(divide=False).shared(Accumulation.of)
    weighing = made.weigh(made.split(3))
    assert weighing.one_batch.weights == pytest.approx([1 / 3] * 3)
    assert weighing.accumulated.weights == pytest.approx([1.0] * 3)
    assert max(weighing.one_batch.residual, weighing.accumulated.residual) < 1e-13


def test_noise_that_torch_draws_is_the_same_for_every_row():
    assert evidence(noisy, rows=36).shared(Accumulation.of).split(2).equal
    made = evidence(noisy, rows=36, divide=False).shared(Accumulation.of)
    assert made.weigh(made.split(2)).accumulated.weights == pytest.approx((1.0, 1.0))


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


def test_a_parts_loss_says_what_dividing_would_do():
    def weighted(model, batch):
        x, y = batch
        weights = (x[:, :1] > 0).to(x.dtype) + 0.5
        return ((model(x) - y).square() * weights).sum() / weights.sum()

    declared = Evidence(lambda: TrainLoop(model=nn.Linear(3, 1), batch=(X, X[:, :1]), loss=weighted))
    a, b = declared.shared(Accumulation.of_loss).weights_of_halves()
    assert a + b == pytest.approx(1.0)
    assert a != pytest.approx(b, rel=1e-3)


X = torch.randn(12, 3, generator=torch.Generator().manual_seed(4))
