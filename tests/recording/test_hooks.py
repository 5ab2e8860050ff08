"""Hooks on every module: what they are called with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop.recording.hooks import after_modules


class Refuses(nn.Module):
    def forward(self, x, *, scale):
        raise ValueError("refused")


def test_after_an_exception_a_hook_with_keywords_gets_none():
    """torch passes no keywords to a global hook then, and would call it with an argument less."""
    calls = []

    def hook(module, args, kwargs, output):
        calls.append((args, kwargs, output))

    handle = after_modules(hook, with_kwargs=True, always_call=True)
    try:
        x = torch.ones(2, 3)
        nn.Linear(3, 1)(input=x)
        with pytest.raises(ValueError, match="refused"):
            Refuses()(x, scale=2)
    finally:
        handle.remove()
    (_, given, made), (args, kwargs, output) = calls
    assert given["input"] is x
    assert made.shape == (2, 1)
    assert args == (x,)
    assert kwargs == {}
    assert output is None
