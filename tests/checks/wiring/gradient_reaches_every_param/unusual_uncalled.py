"""Declared modules that training does not call, and is not to."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def loop(model, net, after=lambda: None, scores=None) -> TrainLoop:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy((scores or net)(x), y).backward()
            optimizer.step()
            after()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)


@odd(notes="an average of the weights is declared: it is updated, and called in evaluation only")
def average_declared_beside_the_net() -> TrainLoop:
    net = relu_mlp(8, 16, 4)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    return loop({"net": net, "average": average}, net, lambda: average.update_parameters(net))


@odd(notes="slow weights are never called: those that train are pulled back to them")
def slow_weights_of_a_lookahead() -> TrainLoop:
    net = relu_mlp(8, 16, 4)
    slow, count = copy.deepcopy(net).requires_grad_(False), [0]

    def pull():
        count[0] += 1
        if count[0] % 3 == 0:
            with torch.no_grad():
                for kept, live in zip(slow.parameters(), net.parameters(), strict=True):
                    kept.lerp_(live, 0.5)
                    live.copy_(kept)

    return loop({"net": net, "slow": slow}, net, pull)


@odd(notes="a module is never called itself: its weights are given to functions")
def weights_used_by_functions() -> TrainLoop:
    net, base = relu_mlp(8, 16, 4), nn.Linear(8, 4).requires_grad_(False)
    return loop({"net": net, "base": base}, net, scores=lambda x: net(x) + F.linear(x, base.weight, base.bias))
