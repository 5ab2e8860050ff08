"""Windows whose number of micro-batches stands in the loop's own code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.batch.accumulation_equivalence.fixed_window import fixed_window
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.runs.evidence import Evidence

COUNTS = [4, 7, 4, 2, 7, 7, 3, 7]


def evidence(backward, *, window=4, remainder=False, counts=COUNTS):
    def make():
        model = nn.Linear(3, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            held = 0
            for x, y in batches:
                backward(model, F.cross_entropy(model(x).flatten(0, 1), y.flatten()), len(x))
                held += 1
                if held == window:
                    optimizer.step()
                    optimizer.zero_grad()
                    held = 0
            if remainder and held:
                optimizer.step()

        x, y = torch.randn(8, 7, 3), torch.randint(5, (8, 7))
        beyond = torch.arange(7) >= torch.tensor(counts)[:, None]
        return TrainLoop(model=model, optimizer=optimizer, batch=(x, y.masked_fill(beyond, -100)), fit=fit)

    return Evidence(make)


def plain(_model, loss, _rows):
    loss.backward()


def divided(model, loss, _rows):
    loss.backward()
    for parameter in model.parameters():
        parameter.grad /= 4


@pytest.mark.parametrize("remainder", [False, True])
def test_a_mean_of_means_is_advice(remainder):
    seen = evidence(plain, remainder=remainder)
    found = seen.shared(fixed_window)
    assert (found.found.cause, found.found.level) == ("mean_of_means", "advice")
    assert str(found.composition) == "rows [3] | [7] | [7] | [7]"
    assert found.weighing.by_counts
    assert seen.shared(StepGradients.of).window == 4


def test_gradients_that_are_divided_each_time_are_told_by_their_places():
    found = evidence(divided, counts=[7] * 8).shared(fixed_window)
    assert (found.found.cause, found.found.level) == ("divided_twice", "fault")
    assert found.weighing.accumulated.weights == pytest.approx([w * 3 / 255 for w in (1, 4, 16, 64)], rel=0.01)


@pytest.mark.parametrize(
    ("backward", "fields"),
    [
        (plain, {"counts": [7] * 8}),
        (lambda model, loss, rows: (loss * rows / 8).backward(), {"counts": [7] * 8}),
        (plain, {"window": 1}),
    ],
)
def test_other_windows_say_nothing(backward, fields):
    assert evidence(backward, **fields).shared(fixed_window) is None
