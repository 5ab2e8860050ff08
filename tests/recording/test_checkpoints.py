"""Functions under activation checkpointing, as a record has them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential

from pytest_trainloop.recording.torch_internals import checkpoint_generators
from pytest_trainloop.recording.watch import Watch

CAPTURED = functools.partial(checkpoint, use_reentrant=False)


def seen(call, *, needs_grad=True):
    body = nn.Linear(3, 3)
    with Watch({"": body}) as watch:
        out = call(body, torch.randn(2, 3, requires_grad=needs_grad))
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.sum().backward()
    return watch.record.checkpoints


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_call_is_seen_once_and_not_when_it_is_run_again(reentrant, needs_grad):
    (call,) = seen(lambda f, x: checkpoint(f, x, use_reentrant=reentrant), needs_grad=needs_grad)
    assert (call.reentrant, call.needs_grad, call.preserves, call.grad_enabled) == (reentrant, needs_grad, True, True)
    assert "checkpoint(f, x" in call.place.code


def test_what_was_captured_before_is_seen():
    (call,) = seen(CAPTURED)
    assert not call.reentrant


@pytest.mark.parametrize("reentrant", [True, False])
def test_that_nothing_is_preserved(reentrant):
    (call,) = seen(lambda f, x: checkpoint(f, x, use_reentrant=reentrant, preserve_rng_state=False))
    assert not call.preserves


def test_segments_and_checkpoints_within_one():
    assert len(seen(lambda f, x: checkpoint_sequential([f, f, f], 3, x, use_reentrant=False))) == 2
    assert len(seen(lambda f, x: checkpoint(lambda y: CAPTURED(f, y), x, use_reentrant=False))) == 2


def test_without_gradients():
    def call(f, x):
        with torch.no_grad():
            return CAPTURED(f, x)

    assert [c.grad_enabled for c in seen(call)] == [False]


class Other(CheckpointFunction):
    """Somebody's own."""


def test_a_class_below_torchs_own_stays_what_it_is():
    kinds = []

    def call(f, x):
        kinds.append(type(Other.apply(f, True, x).grad_fn).__name__)
        return x

    assert len(seen(call)) == 1
    assert kinds == ["OtherBackward"]


def test_torch_is_as_it_was():
    before = (CheckpointFunction.__dict__.get("apply"), [getattr(o, n) for o, n in checkpoint_generators()])
    assert before[1]
    seen(CAPTURED)
    assert (CheckpointFunction.__dict__.get("apply"), [getattr(o, n) for o, n in checkpoint_generators()]) == before
