"""First losses that are scaled, negative, or zero by design."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from pytest_trainloop.loop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def loop(model, draw, loss_of, **fields) -> TrainLoop:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=draw(), batches=fresh(draw), fit=fit, **fields)


@odd(notes="the loss is multiplied by a constant before backward, and declared without it")
def loss_times_a_constant() -> TrainLoop:
    return loop(
        relu_mlp(8, 24, 4),
        points,
        lambda m, b: 128 * F.cross_entropy(m(b[0]), b[1]),
        expected_init_loss=math.log(4),
    )


@odd(notes="the loss is multiplied by a constant before backward, and nothing is declared")
def large_loss_weight() -> TrainLoop:
    return loop(relu_mlp(8, 24, 4), points, lambda m, b: 1000 * F.cross_entropy(m(b[0]), b[1]))


@odd(notes="log-odds of random nets are zero in the mean: no single seed is")
def loss_of_zero_in_the_mean() -> TrainLoop:
    def loss_of(model, batch):
        low, high = model(batch[0]).chunk(2, 1)
        return (high - low).mean() + 1e-3 * (high - low).square().mean()

    return loop(relu_mlp(8, 24, 2), lambda: curves(rows=16), loss_of, expected_init_loss=0.0)


@odd(notes="a bonus is earned: the first loss is negative, and declared")
def negative_first_loss() -> TrainLoop:
    def loss_of(model, batch):
        chosen = model(batch[0]).softmax(1).gather(1, batch[1][:, None])
        return -chosen.mean()

    return loop(relu_mlp(8, 24, 4), points, loss_of, expected_init_loss=-0.25)
