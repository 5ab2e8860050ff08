"""Runs over batches that the project draws only when they are asked for: what draws them is no part of the loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.recording.events import Backward
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.no_randomness import NoRandomness
from tests.loops import plain


def rollouts():
    """A policy that draws its own data with a model call, a gradient and a step of another optimizer."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def draw():
        states = torch.randn(6, 3, requires_grad=True)
        (direction,) = torch.autograd.grad(model(states).sum(), states)
        return (states + 0.1 * direction).detach()

    return plain.loop(
        model,
        None,
        lambda model, states: F.mse_loss(model(states), torch.zeros(6, 1)),
        batches=lambda n: (draw() for _ in range(n)),
    )


def test_what_the_project_does_to_draw_a_batch_is_not_recorded():
    record = Evidence(rollouts).run()
    assert len(record.root_forwards()) == len(record.of(Backward)) == record.steps
    assert {b.kind for b in record.of(Backward)} == {"backward"}


def test_batches_are_drawn_as_they_are_where_the_loop_draws_nothing():
    given = []

    def note(number, item):
        given.append(item.clone())

    evidence = Evidence(rollouts)
    for contexts in (lambda watch: (), lambda watch: (NoRandomness(),)):
        given.append("run")
        evidence.rerun(contexts=contexts, before_item=note, count=1)
    plain, without = given[1], given[-1]
    assert not torch.equal(plain[0], plain[1])
    assert not torch.equal(without[0], without[1])
