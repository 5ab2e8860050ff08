"""What training outputs along a loss shows of a quantity."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.instruments.formulas.catalogue import FORMS
from pytest_trainloop.instruments.formulas.trial import Aim, Step, tried
from pytest_trainloop.instruments.tracing.loss_tape import Tapes
from pytest_trainloop.runs.evidence import Evidence

DISTANCE = Aim("the distance", lambda p, t: (p - t).abs())


def step_of(backpropagate):
    def make():
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                backpropagate(net(x), y)
                optimizer.step()

        return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(6, 4), torch.randn(6, 2)), fit=fit)

    slices = Evidence(make).shared(Tapes.of).slices
    return Step(slices[0], slices)


def outcome(loss_of, aim=DISTANCE, **options):
    step = step_of(lambda p, t: loss_of(p, t).backward())
    (output,) = step.part.trained(step.part.root)
    (target,) = step.part.from_batch(step.part.root)
    return tried(step, (output.number, target.number), output.number, aim, **options)


@pytest.mark.parametrize(
    ("loss_of", "confirmed"),
    [
        (lambda p, t: F.mse_loss(p, t), False),
        (lambda p, t: 1e-6 * F.mse_loss(p, t), False),
        (lambda p, t: F.mse_loss(p, t) - 0.1 * (p - t).abs().mean(), False),
        (lambda p, t: torch.log1p((p - t).square()).sum(), False),
        (lambda p, t: -F.mse_loss(p, t), True),
        (lambda p, t: torch.exp(-(p - t).square()).mean(), True),
        (lambda p, t: (p - t).mean() ** 2, True),
    ],
)
def test_whether_a_loss_brings_predictions_to_their_targets(loss_of, confirmed):
    assert outcome(loss_of).confirmed is confirmed


@pytest.mark.parametrize(("weight", "endless"), [(0.0, True), (0.1, False)])
def test_what_gets_worse_without_end(weight, endless):
    aim = Aim("the size", lambda p, t: p.abs(), best=0.0, endless=True)
    assert outcome(lambda p, t: (weight * p.square() - p + 0 * t).mean(), aim).confirmed is endless


@pytest.mark.parametrize(("factor", "moved"), [(1.0, False), (2.0, True)])
def test_the_optimum_is_moved(factor, moved):
    def loss_of(out, target):
        log_var = out[:, :1]
        return (factor * log_var + target[:, :1].square() * (-log_var).exp()).mean()

    aim = Aim("the cost", lambda out, t: out[:, :1] + t[:, :1].square() * (-out[:, :1]).exp(), shared=True)
    assert outcome(loss_of, aim, shifted=True).confirmed is moved


def test_other_backward_passes_of_the_step_count():
    def backpropagate(p, t):
        (-0.5 * F.mse_loss(p, t)).backward(retain_graph=True)
        F.mse_loss(p, t).backward()

    step = step_of(backpropagate)
    (output,) = step.part.trained(step.part.root)
    (target,) = step.part.from_batch(step.part.root)
    assert not tried(step, (output.number, target.number), output.number, DISTANCE).confirmed


def test_a_form_that_refuses_the_arguments_decides_nothing():
    assert outcome(lambda p, t: F.mse_loss(p, t), Aim("nothing", lambda p, t: None)) is None


def test_what_has_no_aim_is_advice():
    """A form that is only recognised accuses nobody."""
    found = [
        (form.name, variant.mistake.summary)
        for form in FORMS
        for variant in form.variants
        if variant.mistake is not None and variant.mistake.level == "fault" and variant.aim is None
    ]
    assert not found
