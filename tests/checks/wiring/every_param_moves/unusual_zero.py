"""Correct loops with weights that are at zero and stay there, or come back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.wiring.every_param_moves.faults_zero import zero_biases
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


class Projected(torch.optim.SGD):
    """SGD, and after each step ``project`` on each tensor, by the optimizer itself."""

    def __init__(self, params, project, lr=0.05):
        super().__init__(params, lr=lr)
        self.project = project

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.project(p))


def loop(model, optimizer, loss=F.cross_entropy):
    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


class Damped(nn.Module):
    """A penalty pushes the shift below zero, where the optimizer does not let it go."""

    def __init__(self):
        super().__init__()
        self.body, self.shift = mlp(6, 24, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.body(x) + self.shift


def _pushed(scores, y):
    return F.cross_entropy(scores, y) + 2.0 * scores.sum(1).mean()


@odd(notes="a weight at the bound of a projection, with a gradient that pushes it outwards")
def shift_held_at_zero_by_its_bound() -> TrainLoop:
    model = Damped()
    optimizer = Projected(model.parameters(), lambda p: p.clamp(min=0) if p.shape == (3,) and p.dim() == 1 else p)
    return loop(model, optimizer, _pushed)


@odd(notes="a proximal step (soft thresholding) keeps small weights at exactly zero")
def shift_held_at_zero_by_a_proximal_step() -> TrainLoop:
    model = Damped()
    optimizer = Projected(model.parameters(), lambda p: F.softshrink(p, 0.2) if p.shape == (3,) else p)
    return loop(model, optimizer)


@odd(notes="pruned weights: the optimizer multiplies by the mask of what is left")
def pruned_layer_stays_at_zero() -> TrainLoop:
    model = zero_biases(mlp(6, 24, 3))
    return loop(model, Projected(model.parameters(), lambda p: p * 0.0 if p.dim() == 1 else p))


@odd(notes="biases begin at zero and move by ordinary steps")
def biases_from_zero() -> TrainLoop:
    model = zero_biases(mlp(6, 24, 3))
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.05))
