"""The weights that make the first loss too high."""

import pytest
import torch
from torch import nn

from pytest_trainloop.frontends.api import check_loop
from tests.loops.plain import cross_entropy, loop


def draw_all(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=4.0)


def draw_head(model):
    nn.init.trunc_normal_(model[-1].weight, std=100.0, a=-200.0, b=200.0)


def scale_head(model):
    with torch.no_grad():
        model[-1].weight *= 1000


def finding_of(draw):
    def make():
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        draw(model)
        return loop(model, (torch.randn(16, 6), torch.arange(16) % 4), cross_entropy)

    report = check_loop(make, only=["loss_at_init"], raises=False)
    return next(f for r in report.results for f in r.findings if f.cause == "too_high")


@pytest.mark.parametrize(
    ("draw", "line"),
    [
        (draw_head, "nn.init.trunc_normal_(model[-1].weight, std=100.0, a=-200.0, b=200.0)"),
        (
            scale_head,
            "model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))",
        ),
    ],
)
def test_one_wide_layer_is_named_with_the_line_that_draws_it(draw, line):
    found = finding_of(draw)
    assert found.culprits == ("cross_entropy", "4.weight")
    assert found.repair == "initialise 4.weight with std=0.1, that of torch's own layers"
    assert found.tried.startswith("with this change the loss is 1.")
    assert found.change.endswith(line)


def test_several_wide_layers_are_named_together_where_no_single_one_explains_it():
    found = finding_of(draw_all)
    assert found.culprits[0] == "cross_entropy"
    assert "4.weight" in found.culprits
    assert "is the cause" not in found.shown_by
