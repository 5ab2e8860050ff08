"""Other rates inside the steps of a loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.runs.optimizer_options import lr_held_at_peak, lr_times
from pytest_trainloop.runs.run import RunPlan, run

seen: list[float] = []


class Seen(torch.optim.SGD):
    def step(self, closure=None):
        seen.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


def run_with(contexts, lr=1.0):
    seen.clear()
    outside = []

    def make():
        model = nn.Linear(3, 1)
        optimizer = Seen(model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                outside.append(float(optimizer.param_groups[0]["lr"]))
                schedule.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.ones(2, 3), fit=fit)

    run(make, RunPlan(contexts=contexts, count=3, enough=lambda r: r.rounds >= 3))
    return outside


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_rates_are_others_inside_steps_only(lr):
    assert run_with(lr_times(10.0), lr) == [1.0, 0.5, 0.25]
    assert seen == [10.0, 5.0, 2.5]


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_rates_are_held_at_their_peak(lr):
    assert run_with(lr_held_at_peak(), lr) == [1.0, 0.5, 0.25]
    assert seen == [1.0, 1.0, 1.0]
