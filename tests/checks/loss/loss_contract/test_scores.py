"""What the entries of a tensor say by themselves."""

import pytest
import torch

from pytest_trainloop import TrainLoop, check_loop
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


@pytest.mark.parametrize(("reduction", "lowest"), [("mean", 0.5514), ("sum", 3.86)])
def test_the_lowest_loss_of_probabilities_is_in_the_reduction_of_the_call(reduction, lowest):
    def loss(model, batch):
        scores, labels = model(batch[0]).softmax(1), batch[1].masked_fill(torch.arange(8) == 0, -100)
        return torch.nn.functional.cross_entropy(scores, labels, reduction=reduction)

    def make():
        return TrainLoop(model=torch.nn.Linear(4, 3), batch=(torch.randn(8, 4), torch.arange(8) % 3), loss=loss)

    report = check_loop(make, only=["loss_contract"], raises=False)
    assert f", where {lowest} is the lowest: over 3 classes" in report.results[0].findings[0].measured
