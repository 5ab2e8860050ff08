"""What the entries of a tensor say by themselves."""

import pytest
import torch

from pytest_trainloop.checks.loss.loss_contract.scores import exceeds_one, logs_of_one, sums_to_one

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2, 10, 5000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_a_softmax_of_any_precision_sums_to_one_and_its_logarithm_is_one(dtype, classes, scale):
    scores = (torch.randn(200, classes, generator=torch.Generator().manual_seed(classes)) * scale).to(dtype)
    assert sums_to_one(scores.softmax(1), 1)
    assert logs_of_one(scores.log_softmax(1), 1)
    assert not exceeds_one(scores.log_softmax(1), 1)
    assert not exceeds_one(scores.log_softmax(1)[:, : max(2, classes // 2)], 1)


def test_a_row_that_sums_to_one_by_chance_is_no_distribution():
    scores = torch.tensor([[0.25, 0.75], [0.4, 0.7]])
    assert sums_to_one(scores[:1], 1)
    assert not sums_to_one(scores, 1)
    assert not sums_to_one(torch.tensor([[1.5, -0.5]]), 1)
