"""Runs of one loop from one start, with nothing drawn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.run import RunPlan, run
from pytest_trainloop.runs.same_start import SameStart, from_same_start


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.Dropout1d(0.5),
        nn.AlphaDropout(0.5),
        nn.Dropout(0.5, inplace=True),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.FeatureAlphaDropout(0.3)),
    ],
    ids=repr,
)
def test_what_draws_or_joins_rows_is_still(module):
    module = module.train()
    x = torch.randn(6, 4)
    with NoRandomness():
        whole = module(x.clone())
        parts = torch.cat([module(x[:2].clone()), module(x[2:].clone())])
    assert torch.allclose(whole, parts, rtol=0, atol=1e-6)


def test_attention_and_recurrent_nets_are_still():
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    recurrent = nn.LSTM(8, 4, num_layers=2, dropout=0.5, batch_first=True)
    x = torch.randn(3, 5, 8)
    with NoRandomness():
        for call in (
            lambda: attention(x, x, x)[0],
            lambda: recurrent(x)[0],
            lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        ):
            assert torch.equal(call(), call())


def test_a_norm_without_running_statistics_stays_as_it_is():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    x = torch.randn(6, 4)
    with NoRandomness():
        assert torch.equal(norm(x), nn.BatchNorm1d(4, track_running_stats=False)(x))


def make(width=4, extra=False, scale=1.0):
    def built():
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        if extra:
            model.append(nn.Linear(1, 1))
        with torch.no_grad():
            model[0].weight.mul_(scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(4, 3), fit=fit)

    return built


def started(start, built):
    return run(built, from_same_start(RunPlan(), start, lambda loop: [loop.batch]))


def test_every_run_begins_with_the_weights_of_the_first():
    start = SameStart()
    first, second = started(start, make()), started(start, make(scale=2.0))
    assert first.double
    assert first.end.keys() == second.end.keys()
    assert all(sample.same(second.end[index]) for index, sample in first.end.items())


@pytest.mark.parametrize(
    ("other", "words"), [(make(extra=True), "is only in one"), (make(width=5), "is built in shape")]
)
def test_a_model_that_is_built_differently_is_not_compared(other, words):
    start = SameStart()
    started(start, make())
    with pytest.raises(CannotDecide, match=words):
        started(start, other)
