"""What loss functions give of an answer that knows nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLosses, scaled
from pytest_trainloop.runs.run import RunPlan, run
from tests.loops.plain import loop


def seen(loss_of, *, scale=1.0):
    def make():
        return loop(nn.Linear(3, 4), torch.randn(8, 3), lambda model, x: loss_of(model(x)))

    found = InitialLosses()
    plan = RunPlan(contexts=found.contexts, count=3, prepare=scaled(scale), enough=lambda r: r.rounds >= 2)
    run(make, plan)
    return found.recorded


LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 2, -100])
EVEN = torch.tensor([0.0, 1.0] * 16).reshape(8, 4)
VALUES = torch.arange(32.0).reshape(8, 4)

KNOWN = {
    "classes": (lambda out: F.cross_entropy(out, LABELS), math.log(4)),
    "a sum": (lambda out: F.cross_entropy(out, LABELS, reduction="sum"), 7 * math.log(4)),
    "one by one": (lambda out: F.cross_entropy(out, LABELS[:7].repeat(2)[:8], reduction="none").mean(), math.log(4)),
    "weights": (lambda out: F.cross_entropy(out, LABELS, weight=torch.tensor([1.0, 2.0, 3.0, 4.0])), math.log(4)),
    "smoothing": (lambda out: F.cross_entropy(out, LABELS, label_smoothing=0.2), math.log(4)),
    "log-probabilities": (lambda out: F.nll_loss(F.log_softmax(out, 1), LABELS), math.log(4)),
    "odds": (lambda out: F.binary_cross_entropy_with_logits(out, EVEN), math.log(2)),
    "odds that weigh": (
        lambda out: F.binary_cross_entropy_with_logits(out, EVEN, pos_weight=torch.tensor(3.0)),
        2 * math.log(2),
    ),
    "probabilities": (lambda out: F.binary_cross_entropy(out.sigmoid(), EVEN), math.log(2)),
    "squares": (lambda out: F.mse_loss(out, VALUES), float((VALUES**2).mean())),
    "squares the other way": (lambda out: F.mse_loss(VALUES, out), float((VALUES**2).mean())),
    "distances": (lambda out: F.l1_loss(out, VALUES), float(VALUES.mean())),
    "margins": (lambda out: F.multi_margin_loss(out, LABELS.clamp_min(0)), 0.75),
}


@pytest.mark.parametrize("name", KNOWN)
def test_chance(name):
    loss_of, expected = KNOWN[name]
    calls = seen(loss_of)
    assert calls[0].chance == pytest.approx(expected, rel=1e-5)
    assert len(calls) == 1  # none after the first step


def test_of_paths_through_time():
    def loss_of(out):
        log = F.log_softmax(out.reshape(8, 1, 4), 2)
        return F.ctc_loss(log, torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2]), reduction="sum")

    assert 0 < seen(loss_of)[0].chance < 8 * math.log(4)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: F.mse_loss(out[:4], out[4:]),
        lambda out: F.triplet_margin_loss(out[:2], out[2:4], out[4:6]),
        lambda out: F.gaussian_nll_loss(out, VALUES, torch.ones(8, 4)),
    ],
    ids=["both sides are the model's", "triplets", "a likelihood"],
)
def test_where_it_is_not_known(loss_of):
    assert math.isnan(seen(loss_of)[0].chance)


class LabelSmoothingCrossEntropy(nn.Module):
    """Of the public name and signature of timm's."""

    def forward(self, x, target):
        logs = x.log_softmax(-1)
        return (-0.9 * logs.gather(-1, target.unsqueeze(1)).squeeze(1) - 0.1 * logs.mean(-1)).mean()


def test_losses_of_libraries_are_known_by_the_table():
    LabelSmoothingCrossEntropy.__module__ = "timm.loss.cross_entropy"
    (found,) = seen(lambda out: LabelSmoothingCrossEntropy()(out, LABELS.clamp(min=0)), scale=100.0)
    assert (found.name, found.degree) == ("LabelSmoothingCrossEntropy", 1)
    assert found.chance == pytest.approx(math.log(4))
    assert found.times > 3
