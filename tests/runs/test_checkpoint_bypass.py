"""Checkpoints as plain calls, and what is done around the others."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from pytest_trainloop.recording.torch_internals import checkpoint_generators
from pytest_trainloop.runs.checkpoint_bypass import Piece, switched, without

both = pytest.mark.parametrize("reentrant", [True, False])


def counted(reentrant, *, needs_grad=True, **how):
    """How often a function under a checkpoint runs in one step, and its weight's gradient."""
    torch.manual_seed(0)
    layer, times = nn.Linear(4, 4), []

    def part(x):
        times.append(torch.is_grad_enabled())
        return torch.tanh(layer(x))

    out = checkpoint(part, torch.ones(2, 4, requires_grad=needs_grad), use_reentrant=reentrant, **how)
    if out.requires_grad:
        out.square().sum().backward()
    return times, layer.weight.grad


def test_the_context_of_a_forward_pass_is_entered_all_the_same():
    entered = []

    @contextlib.contextmanager
    def noted(name):
        entered.append(name)
        yield

    def contexts():
        return noted("forward"), noted("again")

    with switched(without):
        counted(False, context_fn=contexts)
    assert entered == ["forward"]


def test_keywords_reach_the_function():
    with switched(without):
        out = checkpoint(lambda x, *, scale: x * scale, torch.ones(2), scale=3.0, use_reentrant=False)
    assert out.tolist() == [3.0, 3.0]


class Noted(Piece):
    preserves = True

    def __init__(self, log):
        self._log = log

    def first(self):
        self._log.append("first")
        return contextlib.nullcontext()

    def again(self):
        self._log.append("again")
        return contextlib.nullcontext()


@both
def test_a_piece_goes_around_both_runs_and_preserves_the_generator(reentrant):
    log = []

    def gradient(preserves):
        torch.manual_seed(0)
        x = torch.ones(64, requires_grad=True)
        call = checkpoint(
            lambda y: nn.functional.dropout(y * y, 0.5), x, use_reentrant=reentrant, preserve_rng_state=preserves
        )
        call.sum().backward()
        return x.grad

    right = gradient(True)
    assert not torch.equal(right, gradient(False))
    with switched(lambda asked: None if asked.preserves else Noted(log)):
        assert torch.equal(right, gradient(False))
    assert log == ["first", "again"]


@both
def test_torch_is_as_it_was_after_an_exception(reentrant):
    def names():
        return CheckpointFunction.__dict__.get("apply"), [getattr(o, n) for o, n in checkpoint_generators()]

    def broken(x):
        raise ValueError("broken")

    before = names()
    with pytest.raises(ValueError, match="broken"), switched(without):
        checkpoint(broken, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    assert names() == before


@both
def test_an_exception_passes_through_a_piece(reentrant):
    def broken(x):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), switched(lambda asked: Noted([])):
        checkpoint(broken, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    assert len(counted(False)[0]) == 2
