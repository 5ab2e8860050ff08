"""Sums over all pairs, and weights that are summed, on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@odd(notes="an energy distance between one-dimensional samples and data, all pairs by a column and a row")
def energy_distance():
    def loss_of(model, batch):
        told = model(batch[0])
        near = (told - batch[1]).abs().mean()
        return near - 0.5 * (told - told.squeeze(1)).abs().mean()

    return loop(mlp(6, 24, 1), (data.labelled()[0], drawn(16, seed=4)), loss_of)


@odd(notes="every positive is to score above every negative: a hinge over all pairs of two batches")
def hinge_over_all_pairs():
    def loss_of(model, batch):
        above, below = model(batch[0]), model(batch[1]).squeeze(1)
        return F.relu(1 - above + below).mean()

    x = data.labelled()[0]
    return loop(mlp(6, 24, 1), (x + 0.2, x.flip(0)), loss_of)


@odd(notes="losses come weighted with the data; their sum is divided by the sum of the weights")
def divided_by_the_sum_of_weights():
    def loss_of(model, batch):
        told = model(batch["x"])[:, 0]
        return (told.square() - 2 * told * batch["weighted_target"]).sum() / batch["weight"].sum()

    weight = 0.2 + drawn(16, seed=5).abs()
    batch = {"x": data.labelled()[0], "weighted_target": drawn(16, seed=6), "weight": weight}
    return loop(mlp(6, 24, 1), batch, loss_of)


@odd(notes="the return of one episode is the sum of its rewards, and each of its actions gets it")
def return_of_the_episode():
    def loss_of(model, batch):
        states, actions, rewards = batch
        chosen = model(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        return -(chosen * rewards.sum()).mean()

    return loop(mlp(4, 24, 3), data.episode(), loss_of)
