"""By how much norms and biases would shrink over the declared plan."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups
from pytest_trainloop.checks.learning.weight_decay_groups.rules import shrinkage
from pytest_trainloop.runs.evidence import Evidence
from tests.checks.learning.weight_decay_groups.language_model import Model, lm_loss
from tests.loops import data


def loop(steps, schedule=None):
    def make():
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = schedule(optimizer) if schedule else None

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                lm_loss(model, batch).backward()
                optimizer.step()
                if scheduler:
                    scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(), fit=fit, steps=steps)

    return make


def shrinks(make):
    evidence = Evidence(make)
    return shrinkage(evidence, evidence.shared(DecayGroups.of))


def test_nothing_is_said_without_a_plan():
    assert shrinks(loop(None)) is None


def test_a_constant_rate_is_taken_over_all_steps():
    assert shrinks(loop(1000)) == pytest.approx(1 - math.exp(-1000 * 1e-2 * 0.1))


def test_a_schedule_is_taken_as_it_is_projected():
    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

    assert shrinks(loop(1000, cosine)) == pytest.approx(1 - math.exp(-1000 * 0.5e-2 * 0.1), rel=0.02)
