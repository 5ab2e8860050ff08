"""Rounding to a dtype's digits, its range left aside."""

import pytest
import torch

from pytest_trainloop.checks.numerics.precision_parity.expected_error import Rounded, unit_roundoff
from pytest_trainloop.checks.numerics.precision_parity.replay import Choices, RecordChoices

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_rounded_to_nearest(dtype):
    a, b = torch.randn(6, 5, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    with Rounded(dtype, []):
        got = a @ b
    expected = (a.to(dtype).double() @ b.to(dtype).double()).to(dtype).double()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_range_is_that_of_float64(dtype):
    large = torch.full((2, 2), 3e5, dtype=torch.float64)
    with Rounded(dtype, []):
        assert bool((large @ (large * 1e290)).isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_is_no_more_than_the_unit(dtype):
    x = torch.rand(1000, 1, dtype=torch.float64) + 0.5
    one = torch.ones(1, 1, dtype=torch.float64)
    with Rounded(dtype, []):
        apart = ((x @ one - x) / x).abs().max()
    assert unit_roundoff(dtype) / 4 < float(apart) <= unit_roundoff(dtype)


def test_only_what_was_low_is_rounded():
    x, y = torch.full((1, 1), 1 / 3, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    with Rounded(torch.bfloat16, [("mm", False), ("mm", True)]):
        first, second = x.mm(y), x.mm(y)
    assert torch.equal(first, x)
    assert not torch.equal(second, x)


def test_noise_is_of_the_same_size_and_repeats():
    x, one = torch.ones(500, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)

    def once(seed):
        with Rounded(torch.bfloat16, [], noise=seed):
            return x @ one

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert float((once(1) - 1).abs().max()) <= 3.1 * unit_roundoff(torch.bfloat16)


def test_what_noise_draws_is_no_draw_of_the_loops():
    choices = Choices()
    x = torch.ones(5, 1, dtype=torch.float64)
    with RecordChoices(choices), Rounded(torch.bfloat16, [], noise=1):
        torch.nn.functional.dropout(x @ x.T)
    assert len(choices.draws) == 1
