"""Terms of a loss that grow otherwise with the number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.batch.accumulation_equivalence.terms import terms_apart
from pytest_trainloop.runs.evidence import Evidence


def evidence(loss):
    def make():
        model = nn.Linear(3, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            loss(model, *batch).backward()
            optimizer.step()

        batch = (torch.randn(8, 3), torch.randint(5, (8,)))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, step=step)

    return Evidence(make)


def mean_and_sum(model, x, y):
    out = model(x)
    return F.cross_entropy(out, y) + 0.1 * out.square().sum()


def test_a_sum_beside_a_mean_is_told_by_one_row_twice():
    found = evidence(mean_and_sum).shared(terms_apart)
    assert (str(found.once), str(found.twice)) == ("row [6]", "rows [6, 6]")
    (once, twice), (mean, same) = found.summed, found.averaged
    assert (once.op, mean.op) == ("sum", "cross_entropy")
    assert twice.value == pytest.approx(2 * once.value)
    assert same.value == mean.value
    assert "out.square().sum()" in once.place


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"),
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum") + model.weight.square().sum(),
        lambda model, x, y: F.cross_entropy(model(x), y) + model(x).std(0).sum(),
        lambda model, x, y: F.cross_entropy(model(x), y) + torch.cdist(model(x), model(x)).square().sum(),
        lambda model, x, y: F.cross_entropy(model(x), y) + F.relu(model(x).sum(0) - 1).sum(),
    ],
)
def test_other_terms_are_no_such_pair(loss):
    assert evidence(loss).shared(terms_apart) is None


def test_a_single_mean_takes_no_steps():
    seen = evidence(lambda model, x, y: F.cross_entropy(model(x), y))
    seen.run()
    steps = seen.own_steps
    assert seen.shared(terms_apart) is None
    assert seen.own_steps == steps
