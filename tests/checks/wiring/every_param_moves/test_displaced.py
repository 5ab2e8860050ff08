"""A run in which whatever can move does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import bit_equal
from pytest_trainloop.checks.wiring.every_param_moves.displaced import RAISED, displaced_run_at_high_lr
from pytest_trainloop.runs.evidence import Evidence


class Seen(torch.optim.SGD):
    """Notes the rate that its step runs at; calls the step of the class above."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


def evidence(kind=Seen, lr=1e-4, after=lambda model: None):
    optimizers = []

    def make():
        model = nn.Linear(3, 1)
        optimizer = kind(model.parameters(), lr=lr)
        optimizers.append(optimizer)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                after(model)

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(6, 3), torch.randn(6, 1)), fit=fit)

    made = Evidence(make)
    made.run()
    return made, optimizers


@pytest.mark.parametrize("lr", [1e-6, torch.tensor(1e-6)], ids=["number", "tensor"])
def test_rates_are_raised_inside_steps_only(lr):
    made, optimizers = evidence(lr=lr)
    displaced_run_at_high_lr(made, ["weight"])
    assert optimizers[-1].seen[0] == pytest.approx(1e-6 * RAISED)
    assert float(optimizers[-1].param_groups[0]["lr"]) == pytest.approx(1e-6)


def test_it_begins_elsewhere_and_counts_from_there():
    made, _ = evidence(lr=0.0)
    raised = displaced_run_at_high_lr(made, ["weight"])
    by_name = {p.name: p for p in raised.parameters}
    before = {p.name: p for p in made.run().parameters}
    assert not by_name["weight"].start.same(before["weight"].start)
    assert by_name["bias"].start.same(before["bias"].start)
    assert by_name["weight"].index not in raised.changed()


class Bounded(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.clamp_(max=float(p.max()) if p.dim() > 1 else -1.0)


def test_a_weight_at_its_bound_moves_from_another_start():
    made, _ = evidence(Bounded, lr=1e-9)
    assert bit_equal(displaced_run_at_high_lr(made, ["bias"])) == []
