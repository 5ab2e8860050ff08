"""Recomputations find the generators of the forward pass, and the first call that still differs is named."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.checks.numerics.checkpointing_equivalence.recomputation import Repeated
from pytest_trainloop.recording.watch import Watch

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


def step(part, reentrant, bound=None):
    repeated, x = Repeated(bound), torch.ones(8, requires_grad=True)
    with Watch() as watch, repeated.during(watch):
        out = checkpoint(part, x, use_reentrant=reentrant, preserve_rng_state=False)
        out.sum().backward()
    return repeated, out.detach(), x.grad


both = pytest.mark.parametrize("reentrant", [True, False])


@both
@pytest.mark.parametrize("name", DRAWS)
def test_the_recomputation_draws_the_same_and_generators_continue(name, reentrant):
    def after(made):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        OWN.manual_seed(0)
        OWN_RANDOM.seed(0)
        OWN_NUMPY.bit_generator.state = np.random.default_rng(0).bit_generator.state
        return made(), DRAWS[name]()

    (repeated, out, gradient), then = after(lambda: step(lambda x: x * x * DRAWS[name](), reentrant))
    torch.testing.assert_close(gradient, 2 * out)
    assert list(repeated.moved) == [name]
    assert torch.equal(then, after(DRAWS[name])[1])


def test_nothing_moves_where_nothing_is_drawn():
    assert not step(lambda x: x * x, reentrant=False)[0].moved


@both
@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (lambda n, x: (x * (1 + n)).tanh(), ("mul()", "", 1.0)),
        (lambda n, x: (x.sin() if n else x.cos()).tanh(), ("cos()", "sin", 0.0)),
        (lambda n, x: torch.ones(1 + n).sum() * x * x.tanh(), ("ones()", "ones of another shape", 0.0)),
        (lambda n, x: (x * torch.rand(8)).tanh(), None),
    ],
)
def test_the_first_call_that_differs(part, expected, reentrant):
    counter = itertools.count()
    other = step(lambda x: part(next(counter), x), reentrant, bound=1e-9)[0].other
    assert (other and (str(other.call), other.instead, other.by)) == expected
