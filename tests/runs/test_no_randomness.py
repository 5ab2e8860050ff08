"""Runs in which nothing is drawn, also where a checkpoint runs its part of the model again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.runs.no_randomness import NoRandomness


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
