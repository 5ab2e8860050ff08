"""The first call that differs when a checkpoint recomputes it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.checks.numerics.checkpointing_equivalence.first_difference import CompareRecomputation
from pytest_trainloop.recording.watch import Watch
from pytest_trainloop.runs.checkpoint_bypass import switched

both = pytest.mark.parametrize("reentrant", [True, False])


def other(part, reentrant):
    with Watch() as watch:
        comparison = CompareRecomputation(watch, 1e-9)
        with switched(comparison):
            x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            checkpoint(part, x, use_reentrant=reentrant).sum().backward()
    return comparison.other


@both
def test_another_number(reentrant):
    counter = itertools.count(1)
    found = other(lambda x: (x * next(counter)).tanh(), reentrant)
    assert (found.op, found.instead, found.by) == ("mul", "", 1.0)
    assert "next(counter)" in found.place


@both
def test_another_call(reentrant):
    counter = itertools.count()
    found = other(lambda x: (x.sin() if next(counter) else x.cos()).tanh(), reentrant)
    assert (found.op, found.instead) == ("cos", "sin")


@both
def test_another_shape(reentrant):
    counter = itertools.count(1)
    found = other(lambda x: torch.ones(next(counter)).sum() * x * x.tanh(), reentrant)
    assert (found.op, found.instead) == ("ones", "ones of another shape")


@both
def test_draws_are_the_same(reentrant):
    assert other(lambda x: (x * torch.rand(3)).tanh(), reentrant) is None
