"""Options that look like a slip, and are what the loop needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.wiring.hyperparameters_are_plausible.faults import TwoStreams, classifier, dense, stepped_by
from tests.loops import data
from tests.loops.odd import odd


@odd(notes="eps of 1e-3 and a momentum of 0.03, as detectors for pictures have them")
def norms_of_a_detector() -> TrainLoop:
    return dense(lambda width: nn.BatchNorm1d(width, eps=1e-3, momentum=0.03))()


@odd(notes="momentum 1 in norms that keep no statistics, as in meta-learning")
def momentum_of_one_without_statistics() -> TrainLoop:
    return dense(lambda width: nn.BatchNorm1d(width, momentum=1.0, track_running_stats=False))()


@odd(notes="momentum None: the plain average over all batches, in place of an exponential one")
def cumulative_statistics() -> TrainLoop:
    return dense(lambda width: nn.BatchNorm1d(width, momentum=None))()


def from_a_checkpoint(width):
    norm = nn.BatchNorm1d(width, momentum=0.0)
    with torch.no_grad():
        norm.running_mean.copy_(torch.linspace(-0.2, 0.2, width))
        norm.running_var.copy_(torch.linspace(0.5, 1.5, width))
    return norm


@odd(notes="momentum 0 holds the statistics of a checkpoint while the batch's own are trained with")
def pretrained_statistics_held_by_momentum_zero() -> TrainLoop:
    return dense(from_a_checkpoint)()


@odd(notes="SAM's second pass: momentum 0 for one forward pass, put back after it")
def momentum_put_to_zero_for_the_second_pass() -> TrainLoop:
    loop = dense(nn.BatchNorm1d)()
    model, optimizer, norm = loop.model, loop.optimizer, loop.model[1]

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                moves = [0.01 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            momentum, norm.momentum = norm.momentum, 0
            F.cross_entropy(model(x), y).backward()
            norm.momentum = momentum
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a dropout of 0.9, as two-stream networks for video have before their last layer")
def nine_tenths_are_dropped() -> TrainLoop:
    return classifier(lambda: TwoStreams(nn.Dropout(0.9)))()


@odd(notes="dampening as large as the momentum, as Lua's torch had it by default")
def dampening_of_nine_tenths() -> TrainLoop:
    return stepped_by(lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, dampening=0.9, weight_decay=1e-3))()


@odd(notes="the momentum begins at 0 and is warmed up; it was built with 0.9")
def momentum_is_warmed_up() -> TrainLoop:
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def fit(batches):
        for count, (x, y) in enumerate(batches):
            optimizer.param_groups[0]["momentum"] = min(0.9, 0.0005 * count)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)
