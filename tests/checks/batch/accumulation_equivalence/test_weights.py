"""What the weights of micro-batches say."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.batch.accumulation_equivalence.weights import Weighing
from pytest_trainloop.gradients.vectors import Combination

HALVES = (0.5, 0.5)
THIRDS = (1 / 3, 1 / 3, 1 / 3)


def weighing(one, many):
    return Weighing(Combination(tuple(one), 0.0), Combination(tuple(many), 0.0))


@pytest.mark.parametrize(
    ("one", "many", "pattern"),
    [
        (HALVES, (1.0, 1.0), "scaled"),
        (HALVES, (0.25, 0.25), "scaled"),
        ((0.4, 0.6), (0.8, 1.2), "scaled"),
        (HALVES, (0.0, 0.5), "absent"),
        (HALVES, (1e-12, 1.0), "absent"),
        (HALVES, (0.5, 0.0), "last_absent"),
        (THIRDS, (0.0, 1 / 3, 0.0), "last_absent"),
        ((0.48, 0.52), HALVES, "means"),
        ((0.48, 0.52), (1.0, 1.0), "scaled_means"),
        ((0.48, 0.52), (0.25, 0.25), "scaled_means"),
        (HALVES, (0.25, 0.5), "divided_again"),
        (THIRDS, (1 / 27, 1 / 9, 1 / 3), "divided_again"),
        (HALVES, (1.0, 0.5), "divided_by_position"),
        (THIRDS, (1.0, 1 / 2, 1 / 3), "divided_by_position"),
        (HALVES, (0.5 / 512, 0.5), "scaled_again"),
        (THIRDS, (0.49 / 3, 0.7 / 3, 1 / 3), "scaled_again"),
        (THIRDS, (0.5 / 3, 0.7 / 3, 1 / 3), "other"),
        (HALVES, (0.31, 0.47), "other"),
        ((0.48, 0.52), (0.7, 0.7), "other"),
    ],
)
def test_the_pattern(one, many, pattern):
    assert weighing(one, many).pattern == pattern


def test_the_factor_is_that_of_the_sums():
    assert weighing((0.48, 0.52), (1.0, 1.0)).factor == pytest.approx(2.0)


def test_a_token_in_a_million_is_seen():
    assert weighing((0.5000001, 0.4999999), HALVES).pattern == "scaled"
    assert weighing((0.500005, 0.499995), HALVES).pattern == "means"
