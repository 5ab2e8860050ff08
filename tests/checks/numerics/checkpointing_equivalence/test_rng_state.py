"""Which generators draw under a checkpoint, and that they are restored."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.checks.numerics.checkpointing_equivalence.rng_state import RestoreGenerators
from pytest_trainloop.runs.checkpoint_bypass import switched

OWN = torch.Generator().manual_seed(1)
OWN_NUMPY = np.random.default_rng(1)
OWN_RANDOM = random.Random(1)

DRAWS = {
    "torch's generator": lambda: torch.rand(8),
    "a torch.Generator of its own": lambda: torch.rand(8, generator=OWN),
    "python's random": lambda: torch.tensor([random.random() for _ in range(8)]),
    "a random.Random of its own": lambda: torch.tensor([OWN_RANDOM.random() for _ in range(8)]),
    "numpy's np.random": lambda: torch.as_tensor(np.random.rand(8), dtype=torch.float32),
    "a numpy generator of its own": lambda: torch.as_tensor(OWN_NUMPY.random(8), dtype=torch.float32),
}


def step(draw, reentrant):
    x = torch.ones(8, requires_grad=True)
    out = checkpoint(lambda y: y * y * draw(), x, use_reentrant=reentrant, preserve_rng_state=False)
    out.sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_the_recomputation_draws_the_same(name, reentrant):
    found = RestoreGenerators()
    torch.manual_seed(0)
    with switched(found):
        out, gradient = step(DRAWS[name], reentrant)
    torch.testing.assert_close(gradient, 2 * out)
    assert list(found.moved) == [name]


@pytest.mark.parametrize("name", [n for n in DRAWS if n != "torch's generator"])
def test_the_generator_continues_where_the_forward_pass_left_it(name):
    def drawn_after():
        random.seed(0)
        np.random.seed(0)
        OWN.manual_seed(0)
        OWN_RANDOM.seed(0)
        OWN_NUMPY.bit_generator.state = np.random.default_rng(0).bit_generator.state
        yield
        yield DRAWS[name]()

    plain = drawn_after()
    next(plain)
    DRAWS[name]()
    expected = next(plain)
    again = drawn_after()
    next(again)
    with switched(RestoreGenerators()):
        step(DRAWS[name], reentrant=False)
    assert torch.equal(next(again), expected)


def test_nothing_moves_where_nothing_is_drawn():
    found = RestoreGenerators()
    with switched(found):
        step(lambda: torch.ones(8), reentrant=False)
    assert not found.moved
