"""What tells two runs of one loop apart, on records made by hand."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.gradients.compare import agreement, window_sizes
from pytest_trainloop.recording.events import Arrival, Backward, Place, Read, Root, Step
from pytest_trainloop.recording.record import Optimizer, Record
from tests.helpers.records import ONE, parameter

LINE = Place("train.py", 7, "loss.backward()")
SITE = (("train.py", 7),)


def windows(*sizes):
    """So many backward passes before each step."""
    at, events = 1, []
    for size in sizes:
        for _ in range(size):
            root = Root(requires_grad=True, shape=(), value=1.0)
            arrived = {0: [Arrival(at, ONE, None, 0)]}
            kind = "backward"
            events.append(Backward(at=at, until=at, place=LINE, site=SITE, kind=kind, roots=[root], arrivals=arrived))
            at += 1
        events.append(Step(at=at, until=at, place=LINE, site=SITE, optimizer=0, reads=[Read(at, {0: ONE})]))
        at += 1
    held = Optimizer(0, "SGD", declared=True, parameters=(0,), groups=(0,), steps=len(sizes))
    return Record(parameters=[parameter(0, "weight")], optimizers=[held], events=events)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 3, 4), (4, 1), ()])
def test_the_sizes_of_windows(sizes):
    assert window_sizes(windows(*sizes)) == list(sizes)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("one", "many", "ratio", "cosine", "difference"),
    [
        (vector(3.0, 4.0), vector(6.0, 8.0), 2.0, 1.0, 0.5),
        (vector(3.0, 4.0), vector(-3.0, -4.0), 1.0, -1.0, 2.0),
        (vector(1.0, 0.0), vector(0.0, 1.0), 1.0, 0.0, 2**0.5),
        (vector(0.0, 0.0), vector(0.0, 0.0), 1.0, 1.0, 0.0),
        (vector(0.0, 0.0), vector(1.0, 0.0), float("inf"), 0.0, 1.0),
    ],
)
def test_how_far_two_gradients_agree(one, many, ratio, cosine, difference):
    found = agreement(one, many)
    assert (found.ratio, found.cosine, found.difference) == pytest.approx((ratio, cosine, difference))


def test_two_gradients_of_nan_do_not_differ_and_one_does():
    nan = vector(float("nan"), 1.0)
    assert agreement(nan, nan).difference == 0.0
    assert agreement(vector(1.0, 1.0), nan).difference == float("inf")
