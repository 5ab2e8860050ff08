"""Runs in which nothing is drawn, and runs of one loop from one start."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.run import RunPlan, run
from pytest_trainloop.runs.same_start import SameStart, from_same_start
from tests.loops import plain


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


def attention():
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)


def recurrent():
    torch.manual_seed(0)
    return nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)


def gradients_of(module, call):
    def part(y):
        out = module(y, y, y, need_weights=False)[0] if isinstance(module, nn.MultiheadAttention) else module(y)[0]
        return nn.functional.dropout(out, 0.5)

    x = torch.linspace(-1, 1, 48).view(2, 3, 8).requires_grad_()
    call(part, x * 1).square().sum().backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("made", [attention, recurrent])
def test_a_checkpoint_draws_nothing_either(made, reentrant):
    with NoRandomness():
        plain = gradients_of(made(), lambda f, x: f(x))
        again = gradients_of(made(), lambda f, x: checkpoint(f, x, use_reentrant=reentrant))
    torch.testing.assert_close(plain, again)


def make(width=4, extra=False, scale=1.0):
    def built():
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        if extra:
            model.append(nn.Linear(1, 1))
        with torch.no_grad():
            model[0].weight.mul_(scale)
        return plain.loop(model, torch.randn(4, 3), lambda model, x: model(x).square().mean())

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
