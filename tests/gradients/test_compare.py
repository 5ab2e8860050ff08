"""What tells two runs of one loop apart, on records made by hand."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.instruments.gradients.compare import agreement


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
