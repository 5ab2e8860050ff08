"""Which tensor of a batch is a target that no loss reads, on tiny loops."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.unread_targets import UnreadTargets
from pytest_trainloop.runs.evidence import Evidence

HEAD = ["radius_head.weight", "radius_head.bias"]
ROWS = torch.arange(6.0)


def fitting(loss_of, results, **more):
    def make():
        model = nn.Sequential(OrderedDict(trunk=nn.Linear(3, 4), radius_head=nn.Linear(4, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = {"x": torch.randn(6, 3), "y": torch.arange(6) % 4, **more}
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, loss=loss_of)

    evidence = Evidence(make)
    evidence.run()
    return evidence.shared(UnreadTargets).fitting(HEAD, results)


def classified(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def weighed(model, batch):
    return (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * batch["radius"]).mean()


@pytest.mark.parametrize(
    ("results", "values", "found"),
    [
        ({(6, 1)}, ROWS, "radius"),
        ({(6,)}, ROWS[:, None], "radius"),
        ({(6, 8)}, ROWS.long(), "radius"),
        ({(6, 8, 5)}, ROWS.long()[:, None].expand(6, 5).clone(), "radius"),
        ({(6, 4)}, ROWS.long(), ""),  # ids beyond the classes of the result
        ({(6, 2)}, ROWS, ""),
        ({(6, 1)}, torch.ones(6), ""),  # rows that are equal show nothing
        (set(), ROWS, ""),
    ],
)
def test_a_target_has_the_shape_of_the_result(results, values, found):
    assert fitting(classified, results, radius=values) == found


@pytest.mark.parametrize(("name", "found"), [("mean_radius", "mean_radius"), ("camera", ""), ("label", "")])
def test_a_target_bears_a_word_of_the_head(name, found):
    assert fitting(classified, {(6, 1)}, **{name: ROWS}) == found


def test_what_the_loss_reads_is_no_forgotten_target():
    assert fitting(weighed, {(6, 1)}, radius=ROWS + 1) == ""
