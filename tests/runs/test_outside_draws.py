"""The line that draws outside of torch."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.outside_draws import outside_draw, rng_line
from tests.loops import plain


def with_numpy(x):
    noise = np.random.randn(*x.shape)
    return x + torch.from_numpy(noise).float()


def with_python(x):
    scale = 2.0
    return x * scale if random.random() < 2 else x


def with_torch(x):
    return x + torch.randn_like(x)


def evidence(change):
    return Evidence(lambda: plain.loop(nn.Linear(3, 1), torch.ones(4, 3), lambda model, x: model(change(x)).mean()))


@pytest.mark.parametrize(
    ("change", "generator", "code"),
    [
        (with_numpy, "numpy", "noise = np.random.randn(*x.shape)"),
        (with_python, "python", "return x * scale if random.random() < 2 else x"),
    ],
)
def test_the_line_is_named(change, generator, code):
    line = outside_draw(evidence(change))
    assert line.startswith(f"{generator}, ")
    assert line.endswith(code)
    assert "test_outside_draws.py:" in line


def test_draws_of_torch_are_none():
    seen = evidence(with_torch)
    assert outside_draw(seen) == ""
    assert rng_line(seen) == ""


def test_a_tracer_that_was_there_is_put_back():
    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        outside_draw(evidence(with_numpy))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
