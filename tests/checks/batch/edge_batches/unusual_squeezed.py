"""Squeezes that would take the row axis of a batch of one row, in projects that never give one or do not mind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


class Squeezing(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.body = mlp(6, 24, classes)

    def forward(self, x):
        return self.body(x[:, None]).squeeze()


def classified(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@odd(
    notes="squeeze() of scores; the project has a loader that drops what is left over, and gives an example batch only"
)
def scores_squeezed_in_full_batches() -> TrainLoop:
    return loop(Squeezing(), data.labelled(), classified)


@odd(notes="squeeze() of scores, and a loader that leaves five rows over")
def scores_squeezed_with_five_rows_left_over() -> TrainLoop:
    x, y = data.labelled(rows=21)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    return loop(Squeezing(), (x[:16], y[:16]), classified, batches=loader)


@odd(notes="rows are paired with those after them: one row alone makes no pair, and squeeze() is not why")
def pairs_of_rows_squeezed() -> TrainLoop:
    def loss_of(model, batch):
        out = model(batch[0])
        apart = (out[1:] - out[:-1]).square().sum(-1).squeeze()
        same = (batch[1][1:] == batch[1][:-1]).to(out.dtype)
        return (same * apart + (1 - same) * F.relu(1 - apart)).mean()

    return loop(mlp(6, 24, 4), data.labelled(), loss_of, rows_interact=True)


@odd(notes="an environment gives one state at a time for acting, squeezed; the loop learns from whole batches")
def states_squeezed_for_acting_only() -> TrainLoop:
    policy = mlp(4, 24, 3)

    def loss_of(model, batch):
        states, actions, returns = batch
        with torch.no_grad():
            act = int(model(states[:1]).squeeze().argmax())
        losses = F.cross_entropy(model(states), actions, reduction="none")
        return (losses * (1 + returns.square())).mean() + 0.0 * act

    return loop(policy, data.episode(), loss_of)
