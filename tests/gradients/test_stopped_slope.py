"""The share of the slope that a loop stops on one of several paths, and the lines that stop it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.gradients.stopped_slope import StoppedSlope
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import data
from tests.loops.plain import loop


class Skip(nn.Module):
    """Two paths from the first layer to the head; ``stop`` says what the second does to its input."""

    def __init__(self, stop):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.stop = stop

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.head(hidden + 0.3 * self.second(self.stop(hidden)).tanh())


def without_gradient(hidden):
    with torch.no_grad():
        return hidden * 1.0


def straight_through(hidden):
    return hidden + (hidden.round() - hidden).detach()


def evidence_of(model, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])):
    def make():
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        return loop(trained, data.labelled(), loss, optimizer)

    return Evidence(make)


@pytest.mark.parametrize(
    ("stop", "what", "line"),
    [
        (lambda h: h.detach(), "detach", "h.detach()"),
        (lambda h: h.data, "data", "h.data"),
        (without_gradient, "grad_off", "torch.no_grad()"),
    ],
)
def test_passing_through_the_line_brings_back_what_differences_say_is_missing(stop, what, line):
    found = StoppedSlope.of(evidence_of(lambda: Skip(stop)))
    assert 1e-3 < found.share < 0.5
    (site,) = found.sites
    assert site.what == what
    assert line in site.place
    assert site.share == pytest.approx(found.share, rel=1e-4)


def test_a_rounding_whose_slope_is_passed_on_differs_from_the_slope_of_its_steps():
    assert StoppedSlope.of(evidence_of(lambda: Skip(straight_through))).share > 1e-3


def test_a_loop_without_a_single_loss_cannot_be_asked():
    def fit(_model, batch):
        return F.cross_entropy(_model(batch[0]), batch[1]) * float("nan")

    with pytest.raises(CannotDecide):
        StoppedSlope.of(evidence_of(lambda: Skip(lambda h: h), fit))
