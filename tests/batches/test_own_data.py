"""Whether a loop trains on what it is given, or makes its own data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.instruments.batches.own_data import makes_own_data, require_given_data
from pytest_trainloop.runs.evidence import Evidence


def loop(train, accumulate=1, **given):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for number, batch in enumerate(batches, 1):
            train(model, batch).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, fit=fit, **given)


def drawn():
    x = torch.randn(8, 4)
    return x, x.sum(1, keepdim=True).tanh()


def on_what_is_given(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def on_a_copy(model, batch):
    return F.mse_loss(model(batch[0] * 1.0), torch.zeros(8, 1))


def on_labels_alone(model, batch):
    return F.mse_loss(model(torch.ones(8, 4)), batch[1])


def on_the_count(model, batch):
    return on_what_is_given(model, drawn())


def on_the_shape(model, batch):
    x, y = drawn()
    return F.mse_loss(model(x[: batch[0].dim() + 1]), y[: batch[0].dim() + 1])


class Blind(nn.Module):
    """Its input is overwritten."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        return self.body(torch.ones_like(x))


@pytest.mark.parametrize("train", [on_what_is_given, on_a_copy, on_labels_alone])
def test_a_loop_that_reads_its_batches_makes_no_data(train):
    assert not makes_own_data(Evidence(lambda: loop(train, batch=drawn())))


@pytest.mark.parametrize("batch", [torch.zeros(1), torch.arange(4), torch.tensor([True]), drawn()])
@pytest.mark.parametrize("train", [on_the_count, on_the_shape])
def test_a_loop_that_counts_its_batches_makes_its_own_data(train, batch):
    evidence = Evidence(lambda: loop(train, batch=batch))
    assert makes_own_data(evidence)
    with pytest.raises(CannotDecide, match=r"makes its own data.*: none of one row can be composed.*batches=lambda n:"):
        require_given_data(evidence, "none of one row can be composed")


def test_a_batch_without_numbers_may_be_read():
    assert not makes_own_data(Evidence(lambda: loop(on_the_count, batch=["a", "b"])))


def summed(model, batch):
    """Micro-batches of a sum are summed: no division is due."""
    x, y = drawn()
    return F.mse_loss(model(x), y, reduction="sum")


def test_windows_over_draws_of_its_own_are_no_fault_of_the_loop():
    def make(accumulate=1):
        return loop(summed, accumulate=accumulate, batch=torch.arange(4.0))

    report = check_loop(make, only=["accumulation_equivalence"], raises=False)
    (result,) = (r for r in report.results if r.check == "accumulation_equivalence")
    assert (result.outcome, result.needs) == ("skipped", "batches=")


def test_classes_are_not_taken_for_rows_of_a_batch_that_nobody_reads():
    def make():
        model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for _ in batches:
                optimizer.zero_grad()
                model(torch.randn(8, 4))[:, 0].log().mean().neg().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.arange(4.0), fit=fit)

    report = check_loop(make, only=["batch_independence", "input_dependence"], raises=False)
    assert {r.check: r.outcome for r in report.results if r.check in ("batch_independence", "input_dependence")} == {
        "batch_independence": "passed",
        "input_dependence": "passed",
    }


def test_a_model_that_does_not_read_what_the_loop_draws_is_found():
    def make():
        model = Blind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for _ in batches:
                x, y = drawn()
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.zeros(1), fit=fit)

    report = check_loop(make, only=["input_dependence"], raises=False)
    (finding,) = (f for r in report.results for f in r.findings)
    assert (finding.cause, finding.level) == ("inputs_ignored", "fault")
    assert finding.culprits == ("x of Blind",)


def test_a_batch_with_an_expanded_tensor():
    def make():
        batch = {"x": torch.randn(6, 4), "positions": torch.arange(4).expand(6, -1)}
        return loop(lambda model, b: model(b["x"] + b["positions"]).square().mean(), batch=batch)

    assert not makes_own_data(Evidence(make))
