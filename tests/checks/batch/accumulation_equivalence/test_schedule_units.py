"""Rates of an accumulating run beside those of the same steps over whole batches."""

from __future__ import annotations

import math

import pytest

from pytest_trainloop.checks.batch.accumulation_equivalence.schedule_units import between_steps
from pytest_trainloop.runs.progress import Length, Progress

STEPS = 6

SHAPES = {
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "linear": lambda share: 1 - 0.99 * share,
    "exponential": lambda share: 0.1**share,
}


def rates(shape, calls_each, horizon):
    """At each step, which comes before the last call of its window."""
    return [(SHAPES[shape](min(1.0, (n * calls_each + calls_each - 1) / horizon)),) for n in range(STEPS)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [2, 3, 4])
def test_a_schedule_in_micro_batches_is_less_than_a_step_ahead(shape, window):
    whole = rates(shape, 1, STEPS)
    assert between_steps(whole, rates(shape, window, window * STEPS))
    assert not between_steps(whole, rates(shape, window, STEPS))
    assert not between_steps(whole, whole)


def test_rates_that_never_move_say_nothing():
    assert not between_steps([(0.1,)] * STEPS, [(0.1,)] * STEPS)
    assert not between_steps([(0.1,)] * STEPS, [(0.05,)] * STEPS)


def test_a_group_of_constant_rate_beside_one_that_moves():
    one, many = rates("linear", 1, STEPS), rates("linear", 2, 2 * STEPS)
    assert between_steps([(0.0, *r) for r in one], [(0.0, *r) for r in many])


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [
        (Length(horizon=6, calls=6), Length(horizon=24, calls=24), True),
        (Length(horizon=5, calls=6), Length(horizon=23, calls=24), True),
        (Length(horizon=6, calls=6), Length(horizon=6, calls=24), False),
        (Length(horizon=2, calls=2), Length(horizon=2, calls=8), False),
        (Length(horizon=1000, calls=2), Length(horizon=1000, calls=8), False),
        (Length(horizon=1000, calls=2, planned=1000), Length(horizon=1000, calls=8, planned=1000), True),
        (Length(horizon=1000, calls=2, planned=1000), Length(horizon=250, calls=8, planned=1000), False),
    ],
)
def test_progress_is_calls_over_the_horizon(one, many, expected):
    assert Progress(lengths={0: (one, many)}).in_other_units(0) is expected
    assert not Progress(lengths={}).in_other_units(0)
