"""First losses that are scaled, negative, or zero by design."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import plain
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def loop(model, draw, loss_of, **fields) -> TrainLoop:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return plain.loop(model, draw(), loss_of, optimizer, batches=fresh(draw), **fields)


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


@odd(notes="positives are the common ones, and the bias of the last layer is filled with their log-odds")
def bias_of_a_common_class() -> TrainLoop:
    model = relu_mlp(8, 24, 4)
    torch.nn.init.constant_(model[-1].bias, math.log(0.9 / 0.1))

    def loss_of(model, batch):
        p = model(batch[0]).sigmoid()
        y = (batch[0][:, :4] > -1.3).float()
        return -(y * p.log() + (1 - y) * (1 - p).square() * (1 - p).log()).mean()

    return loop(model, points, loss_of)


@odd(notes="one output: all entries of its bias are one drawn number, and the loss is lower with its sign turned")
def one_drawn_bias() -> TrainLoop:
    torch.manual_seed(12)

    def draw():
        x = torch.randn(32, 8)
        return x, (x[:, 0] > 0.5).float()

    def divergence(model, batch):
        """The cross entropy beyond the entropy of labels of which 30 % are positive."""
        entropy = -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1]) - entropy

    return loop(torch.nn.Sequential(torch.nn.Linear(8, 1)), draw, divergence)
