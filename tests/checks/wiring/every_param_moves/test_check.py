"""What ``every_param_moves`` says of a record and of the same run in float64."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.checks.wiring.every_param_moves.check import every_param_moves
from pytest_trainloop.gradients.dependence import Dependence, Dependences
from pytest_trainloop.runs.further_runs import float64_run
from tests.checks.wiring.every_param_moves.test_bit_equal import UNMOVED, run
from tests.helpers.records import FakeEvidence


class Influence:
    """Whether the loss depends on the parameter."""

    def __init__(self, depends):
        self._change = 1e-2 if depends else 0.0

    def influence(self, names):
        return {name: Dependence(self._change, 1e-12) for name in names}


def found(native, double, *, depends=True):
    shared = {Dependences: Influence(depends), float64_run: double}
    return [(f.cause, f.level, f.culprits) for f in every_param_moves(FakeEvidence(native, shared=shared))]


def in_float64(change=4e-4, update=1e-4):
    return run(UNMOVED, [1.0 - change] * 3, torch.float64, update=update)


@pytest.mark.parametrize(("dtype", "level"), [(torch.bfloat16, "fault"), (torch.float16, "fault")], ids=str)
def test_updates_below_half_a_ulp_are_lost(dtype, level):
    assert found(run(UNMOVED, UNMOVED, dtype), in_float64()) == [("lost_to_rounding", level, ("p0",))]


def test_a_learning_rate_too_low_for_float32_is_advice():
    native = run(UNMOVED, UNMOVED, torch.float32, lr=1e-9)
    double = in_float64(change=4e-9, update=1e-9)
    assert found(native, double) == [("lost_to_rounding", "advice", ("p0",))]


def test_what_the_loss_does_not_depend_on_may_stay():
    assert found(run(UNMOVED, UNMOVED), in_float64(), depends=False) == []


def test_updates_that_float64_shows_to_be_large_are_another_matter():
    assert found(run(UNMOVED, UNMOVED), in_float64(change=0.4, update=0.1)) == []
