"""Arms of one experiment: from one start, without randomness, each made once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.core.errors import CannotDecide, Unreliable
from pytest_trainloop.instruments.compositions.experiment import Experiment
from pytest_trainloop.instruments.tracing.lockstep import Tape
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import plain

RUNS = itertools.count(1)


class Body(nn.Module):
    def __init__(self, recomputed=False, counts=False, dtype=None):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)
        self.recomputed, self.counts, self.dtype = recomputed, counts, dtype

    def forward(self, x):
        if x.dtype is self.dtype:
            raise TypeError("no such kernel")
        scale = next(RUNS) if self.counts else 1.0
        if self.recomputed:
            return self.last(checkpoint(self.inner, x, use_reentrant=True)) * scale
        return self.last(self.inner(x)) * scale

    def inner(self, x):
        return self.drop(self.first(x)).tanh()


def experiment(**given):
    def loop():
        return plain.loop(Body(**given), torch.randn(4, 3), lambda model, x: model(x).square().mean())

    return Experiment(Evidence(loop), "halves")


def half(rows):
    return lambda: torch.ones(rows, 3)


def test_the_same_batch_gives_the_same_gradient_and_another_one_another():
    made = experiment()
    one, again, other = (made.arm((key,), half(rows)) for key, rows in (("a", 2), ("b", 4), ("c", 2)))
    assert made.difference(one, again).equal
    assert made.arm(("a",), half(9)) is one
    doubled = made.arm(("d",), lambda: 2 * torch.ones(2, 3))
    assert not made.difference(other, doubled).equal
    assert set(made.by_tensor(one, doubled)) == {"first.weight", "first.bias", "last.weight", "last.bias"}


def test_checkpoints_are_plain_calls():
    made, tape = experiment(recomputed=True), Tape()
    found = made.arm(("a",), half(2), tape)
    assert "tanh" in {name for name, *_ in tape.calls}
    assert found.gradients[0]["first.weight"].any()  # a re-entrant one gives none: its inputs need no gradient


def test_what_a_kernel_refuses_is_said_and_float32_is_the_way_out():
    made = experiment(dtype=torch.float64)
    assert "no such kernel" in made.arm(("a",), half(2)).refused
    made.in_float32()
    assert not made.arm(("a",), half(2)).refused
    assert made.precision == "float32"


def test_a_gradient_that_is_not_finite_is_said():
    made = experiment()
    lost, kept = (made.arm((key,), lambda x=x: torch.full((2, 3), x)) for key, x in (("a", torch.nan), ("b", 1.0)))
    assert made.not_finite(lost) == "the gradient of halves is not finite"
    assert made.not_finite(lost, kept) == ""


def test_arms_that_differ_between_two_runs_are_no_evidence():
    sound, counting = experiment(), experiment(counts=True)
    sound.require_repeatable(("a",), half(2), sound.arm(("again",), half(2)))
    with pytest.raises(Unreliable):
        counting.require_repeatable(("a",), half(2), counting.arm(("again",), half(2)))


def test_a_loop_without_a_step_gives_no_arm():
    def stepless():
        loop = plain.loop(Body(), torch.randn(4, 3), lambda model, x: model(x).mean())
        loop.fit = lambda batches: [loop.model(x).mean().backward() for x in batches]
        return loop

    with pytest.raises(CannotDecide, match="no optimizer step"):
        Experiment(Evidence(stepless), "halves")
