"""Schedules stepped on without training: where they end, what they are called once for, and what stays untouched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.projection import Projections, horizon
from pytest_trainloop.runs.scheduled import Curve, lrs_of, project
from tests.loops import plain


def optimizer():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)


def curve_of(build, ahead=2000):
    held = optimizer()
    scheduler = build(held)
    curve = Curve(calls=[0], lrs=[lrs_of(held)])
    project([scheduler], held, curve, ahead)
    return curve, type(scheduler).__name__


ENDS = {
    "linear": (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=70), 70),
    "lambda": (lambda o: lr_scheduler.LambdaLR(o, lambda n: max(0.0, 1 - n / 300)), 300),
    "milestones": (lambda o: lr_scheduler.MultiStepLR(o, [30, 60]), 60),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 250), 250),
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=90), 90),
    "chained": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 100)], [10]
        ),
        110,
    ),
    "constant": (lambda o: lr_scheduler.ConstantLR(o, 1.0), 0),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.99), None),
    "fading": (lambda o: lr_scheduler.ExponentialLR(o, 0.1), None),
    "restarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 100), None),
    "cycles": (lambda o: lr_scheduler.CyclicLR(o, 0.001, 1.0, step_size_up=50), None),
}


@pytest.mark.parametrize("name", ENDS)
def test_where_a_schedule_ends(name):
    build, end = ENDS[name]
    curve, kind = curve_of(build)
    assert horizon(curve, kind) == end


def test_a_long_schedule_is_asked_in_leaps():
    curve, kind = curve_of(lambda o: lr_scheduler.LambdaLR(o, lambda n: max(0.0, 1 - n / 200_000)), ahead=400_000)
    assert len(curve.calls) < 70_000
    assert horizon(curve, kind) == pytest.approx(200_000, rel=0.01)
    assert curve.lr(100_000)[0] == pytest.approx(0.5, abs=0.01)


def test_the_call_that_raises():
    curve, _ = curve_of(lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=40))
    assert curve.raises_at == 41
    assert "total steps is 40" in curve.message


def loop(each, *, epochs=2, steps=None):
    def make(accumulate=1):
        model = nn.Linear(4, 2)
        held = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.LambdaLR(held, lambda n: max(0.0, 1 - n / 500))

        def fit(batches):
            for _ in range(epochs):
                for number, (x, y) in enumerate(batches, start=1):
                    (F.cross_entropy(model(x), y) / accumulate).backward()
                    if number % accumulate == 0:
                        held.step()
                        held.zero_grad()
                    if each == "micro-batch" or (each == "step" and number % accumulate == 0):
                        scheduler.step()
                if each == "pass":
                    scheduler.step()

        batch = torch.randn(4, 4), torch.randint(0, 2, (4,))
        return TrainLoop(model=model, optimizer=held, batch=batch, fit=fit, steps=steps and steps // accumulate)

    return make


@pytest.mark.parametrize(("each", "unit"), [("step", "step"), ("pass", "epoch"), ("micro-batch", "step")])
def test_what_a_scheduler_is_called_once_for(each, unit):
    (one,) = Evidence(loop(each)).shared(Projections.of).schedulers
    assert (one.unit, one.horizon, one.planned) == (unit, 500, None)


def test_the_plan_is_read_again_for_each_setting_of_the_knob():
    evidence = Evidence(loop("micro-batch", steps=800), knobs={"accumulate": "accumulate"})
    (one,) = evidence.shared(Projections.of).schedulers
    assert (one.plan.steps, one.plan_accumulated.steps, one.plan_accumulated.micro_batches) == (800, 200, 800)
    assert one.accumulated is not None
    assert (one.accumulated.calls, one.accumulated.counts.steps) == (16, 4)


def test_projecting_draws_nothing_and_leaves_the_classes_as_they_were():
    before, step = torch.get_rng_state(), lr_scheduler.LRScheduler.step
    Evidence(loop("step")).shared(Projections.of)
    assert torch.equal(before, torch.get_rng_state())
    assert lr_scheduler.LRScheduler.step is step


def test_no_scheduler_costs_no_run():
    batch = (torch.randn(4, 4), torch.randint(0, 2, (4,)))
    evidence = Evidence(lambda: plain.loop(nn.Linear(4, 2), batch, plain.cross_entropy))
    evidence.run()
    made = evidence.own_steps
    assert evidence.shared(Projections.of).schedulers == ()
    assert evidence.own_steps == made
