"""Whether what the loop backpropagates changes with a parameter, on tiny loops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.core.errors import Unreliable
from pytest_trainloop.instruments.gradients.dependence import Dependences, difference
from pytest_trainloop.runs.evidence import Evidence
from tests.helpers.tiny_loops import BODY, evidence
from tests.loops.plain import loop


def depends(made, names=BODY):
    return {name: found.depends for name, found in made.shared(Dependences).of(names).items()}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.gate = nn.Linear(3, 4), nn.Linear(4, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.head(self.body(x).detach() * self.gate + x.mean())


def test_behind_a_gate_at_zero_it_shows_at_the_second_base_point():
    def make():
        model = Gated()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.randn(6, 3), torch.randn(6, 1))
        return TrainLoop(
            model=model, optimizer=optimizer, batch=batch, loss=lambda model, b: F.mse_loss(model(b[0]), b[1])
        )

    made = Evidence(make)
    made.run()
    assert depends(made) == dict.fromkeys(BODY, True)


def test_it_is_judged_in_its_own_precision_where_a_loop_does_not_run_in_float64():
    def only_single(h):
        if h.dtype != torch.float32:
            raise TypeError("single precision only")
        return h.detach()

    found = evidence(only_single).shared(Dependences).of(BODY)["body.weight"]
    assert found.bound == pytest.approx(1e3 * torch.finfo(torch.float32).eps)
    assert found.depends


def test_a_loop_that_no_seed_holds_is_unreliable():
    outside = torch.Generator().manual_seed(0)
    made = evidence(lambda h: h.detach() + torch.randn(h.shape, generator=outside, dtype=torch.float32).to(h.dtype))
    with pytest.raises(Unreliable, match=r"^two identical runs of the loop backpropagate values that differ by "):
        made.shared(Dependences).of(BODY)


def test_many_parameters_are_judged_by_their_modules():
    def make():
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return loop(
            model, torch.randn(4, 2), lambda model, x: model[4:](model[:4](x).detach()).square().mean(), optimizer
        )

    made = Evidence(make)
    names = [p.name for p in made.run().parameters]
    found = depends(made, names)
    assert [n for n in names if found[n]] == names[:8]


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ([], [], 0.0),
        ([1.0], [1.0], 0.0),
        ([1.0, 2.0], [1.0, 2.2], 0.2 / 2.2),
        ([-1.0], [1.0], 2.0),
        ([0.0], [0.0], 0.0),
        ([1.0], [1.0, 2.0], math.inf),
        ([math.nan], [math.nan], 0.0),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([math.nan], [1.0], math.inf),
    ],
)
def test_the_difference_of_two_runs(a, b, apart):
    assert difference(a, b) == pytest.approx(apart)
    assert difference(b, a) == pytest.approx(apart)
