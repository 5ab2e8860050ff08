"""What counts as dead or saturated, over which dimensions, and what is skipped."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.checks.learning.activations_alive.units import Units
from pytest_trainloop.runs.evidence import Evidence
from tests.checks.learning.activations_alive.faults import Net, loop
from tests.loops import data


def test_channels_of_convolutions_are_units_and_names_are_those_of_the_layer_before():
    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv1d(1, 16, 3), nn.BatchNorm1d(16), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(F.relu(self.norm(self.conv(x.unsqueeze(1)))).mean(-1))

    (layer,) = Units.of(Evidence(loop(Conv))).layers
    assert (layer.path, layer.kind, layer.units, layer.dead) == ("norm", "relu", 16, 0)


def fixed(**given):
    def make():
        made = loop(Net)()
        return TrainLoop(model=made.model, optimizer=made.optimizer, fit=made.fit, **given)

    return make


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"batch": data.labelled()}, "one fixed batch"),
        ({"batches": [data.labelled(seed=i) for i in range(3)]}, "3 different batches are too few"),
        ({"batches": lambda n: [tuple(t.flip(0) for t in data.labelled())] * n}, "1 different batches are too few"),
    ],
)
def test_too_few_different_batches_are_a_skip_that_says_what_to_give(given, reason):
    (result,) = check_loop(fixed(**given), only=["activations_alive"], raises=False).results
    assert result.outcome == "skipped"
    assert reason in result.reason
    assert result.needs == "batches="
