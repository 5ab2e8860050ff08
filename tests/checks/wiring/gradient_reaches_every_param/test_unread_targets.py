"""Which tensor of a batch is a target that no loss reads, on tiny loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.unread_targets import UnreadTargets
from pytest_trainloop.runs.evidence import Evidence

HEAD = ["1.weight", "1.bias"]
ROWS = torch.arange(6.0)


def fitting(loss_of, results, **more):
    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = {"x": torch.randn(6, 3), "y": torch.arange(6) % 4, **more}
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, loss=loss_of)

    evidence = Evidence(make)
    evidence.run()
    return evidence.shared(UnreadTargets).fitting(HEAD, results)


def classified(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def weighed(model, batch):
    return (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * batch["weight"]).mean()


@pytest.mark.parametrize(
    ("results", "values", "found"),
    [
        ({(6, 1)}, ROWS, "weight"),
        ({(6,)}, ROWS[:, None], "weight"),
        ({(6, 8)}, ROWS.long(), "weight"),
        ({(6, 8, 5)}, ROWS.long()[:, None].expand(6, 5).clone(), "weight"),
        ({(6, 4)}, ROWS.long(), ""),  # ids beyond the classes of the result
        ({(6, 2)}, ROWS, ""),
        ({(6, 1)}, torch.ones(6), ""),  # rows that are equal show nothing
        (set(), ROWS, ""),
    ],
)
def test_a_target_has_the_shape_of_the_result(results, values, found):
    assert fitting(classified, results, weight=values) == found


def test_what_the_loss_reads_is_no_forgotten_target():
    assert fitting(weighed, {(6, 1)}, weight=ROWS + 1) == ""
