"""Where a loss says nothing of learning, and what is said instead."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.learning.one_batch import OneBatchRuns
from pytest_trainloop.checks.learning.outcome import learning
from pytest_trainloop.core.errors import CannotDecide, TimeRanOut
from pytest_trainloop.runs.evidence import Evidence


def evidence(train):
    def make():
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-7)
        batch = (torch.randn(6, 3), torch.randn(6, 1))
        return TrainLoop(model=net, optimizer=optimizer, batch=batch, fit=lambda b: train(net, optimizer, b))

    made = Evidence(make)
    made.run()
    return made


def plain(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def ends_early(model, optimizer, batches):
    plain(model, optimizer, list(batches)[:40])


def annealed(model, optimizer, batches):
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        ((1 + number) * F.mse_loss(model(x), y)).backward()
        optimizer.step()


def half_cut_off(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        error = model(x) - y
        (error * error.detach()).mean().backward()
        optimizer.step()


def without_floor(model, optimizer, batches):
    for x, _ in batches:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def warming_up(model, optimizer, batches):
    for number, (x, y) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 1e-9 * number
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def raising(model, optimizer, batches):
    plain(model, optimizer, [b for b, _ in zip(batches, range(20), strict=False)])
    raise ValueError("no more data")


REASONS = {
    ends_early: "fit ends by itself, and 40 steps are too few to tell",
    annealed: "changes from step to step while no weight moves",
    half_cut_off: "does not change as its gradients say",
    without_floor: "the loss has no floor",
    warming_up: "the rate still rises after 300 steps",
    raising: "on one fixed batch fit raised ValueError: no more data after 20 steps",
}


@pytest.mark.parametrize("train", REASONS, ids=lambda train: train.__name__)
def test_nothing_is_said_of(train):
    with pytest.raises(CannotDecide, match=REASONS[train]):
        learning(evidence(train).shared(OneBatchRuns).of())


def test_a_loop_whose_time_runs_out_is_not_judged():
    def slow(model, optimizer, batches):
        for batch in batches:
            time.sleep(0.02)
            plain(model, optimizer, [batch])

    batch = evidence(slow).shared(OneBatchRuns).of()
    batch.plan = replace(batch.plan, timeout=1.0)
    with pytest.raises(TimeRanOut, match=r"^time ran out after \d+ steps: give --trainloop-timeout=2 or more"):
        learning(batch)
