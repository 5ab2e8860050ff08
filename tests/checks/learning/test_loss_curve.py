"""Losses of a run by round, and what their course says."""

from __future__ import annotations

import math

import pytest

from pytest_trainloop.checks.learning.loss_curve import Losses, halved, level, repeats, rising, still_falls
from tests.helpers.record_builder import RecordBuilder


def told(build: RecordBuilder, *values: float):
    """The losses of a build whose roots have these values."""
    record = build.record()
    for backward, value in zip(record.autograd_passes(), values, strict=False):
        backward.roots[0].value = value
    return Losses(record).read()


def steps(count: int, *, per_step: int = 1) -> RecordBuilder:
    build = RecordBuilder([0])
    for _ in range(count):
        for _ in range(per_step):
            build.backward()
        build.step()
    return build


def test_each_step_has_one_loss():
    assert told(steps(3), 3.0, 2.0, 1.0) == [3.0, 2.0, 1.0]


def test_micro_batches_add_up():
    assert told(steps(2, per_step=2), 1.0, 2.0, 3.0, 4.0) == [3.0, 7.0]


def test_a_backward_that_no_step_followed_yet_is_left_out():
    build = steps(2)
    build.backward()
    assert told(build, 3.0, 2.0, 1.0) == [3.0, 2.0]


def test_several_optimizers_step_on_one_loss():
    build = RecordBuilder([0], [1])
    for _ in range(2):
        build.backward()
        build.step(0)
        build.step(1)
    assert told(build, 3.0, 2.0) == [3.0, 2.0]


def test_of_a_closure_the_first_call_counts():
    build = RecordBuilder([0])
    for _ in range(2):
        build.step(closure=[lambda: build.backward()] * 3)
    assert told(build, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5) == [5.0, 2.0]


def test_scaled_losses_are_divided_by_their_scale():
    build = RecordBuilder([0])
    build.scaler("scale")
    build.backward()
    build.step()
    assert told(build, 2048.0) == [2.0]


def test_what_is_maximized_is_negated():
    build = steps(2)
    build.optimizers[0].maximizes = True
    assert told(build, 1.0, 2.0) == [-1.0, -2.0]


def test_gradients_taken_by_grad_only():
    build = RecordBuilder([0])
    build.backward(kind="grad")
    build.step()
    assert told(build, 4.0) == [4.0]


def test_reading_goes_on_where_it_stopped():
    build = steps(1)
    build.events[0].roots[0].value = 3.0
    losses = Losses(build.record())
    assert losses.read() == [3.0]
    build.backward().roots[0].value = 2.0
    assert losses.read() == [3.0]
    build.step()
    assert losses.read() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([4.0] * 4 + [2.0] * 4, True),
        ([4.0] * 4 + [2.0, 2.0, 2.0, 2.1], False),
        ([4.0, 1.0, 4.0, 1.0, 2.0, 0.5, 2.0, 0.5], True),
        ([4.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0], False),
        ([0.0] * 8, False),
        ([-4.0] * 4 + [-8.0] * 4, False),
        ([4.0] * 4 + [math.nan] * 4, False),
        ([4.0, 2.0], False),
    ],
    ids=["halved", "one is not", "alternating", "one of two", "zero", "negative", "not finite", "short"],
)
def test_halved_under_each_seed(losses, expected):
    assert halved(losses) is expected


def test_the_level_is_the_mean_of_the_last_rounds():
    assert level([9.0, 9.0, *[1.0, 3.0] * 6]) == 2.0
    assert level([1.0, 3.0, 100.0], 2) == 2.0
    assert math.isnan(level([]))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0] * 3, True),
        ([1.0] * 4 + [1.00001] * 4, True),
        ([1.0] * 4 + [1.001] * 4, False),
        ([1.0] * 4 + [math.nan] * 4, False),
    ],
    ids=["with their seeds", "rounding", "annealed", "not finite"],
)
def test_losses_come_again_with_their_seed(losses, expected):
    assert repeats(losses) is expected


def test_rates_that_still_rise():
    assert rising([i / 100 for i in range(100)])
    assert not rising([*[i / 10 for i in range(10)], *[1.0] * 90])
    assert not rising([1.0] * 10)
    assert not rising([])


def test_a_loss_that_still_falls():
    assert still_falls([100.0 - i for i in range(100)])
    assert not still_falls([100.0 - min(i, 20) for i in range(200)])
    assert not still_falls([100.0 + i for i in range(100)])
