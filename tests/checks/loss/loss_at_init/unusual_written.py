"""Losses written by hand whose value for outputs of zero is no chance level."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.odd import odd


def loop(loss_of, std=1.0):
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    nn.init.normal_(model[2].weight, std=std)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), x, y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="advantages have mean 0: for equal scores the loss of a policy is what rounding leaves of 0")
def policy_with_centred_advantages() -> TrainLoop:
    def loss_of(scores, x, y):
        logs = scores.log_softmax(-1).gather(1, y[:, None]).squeeze(1)
        return -(logs * (x[:, 0] - x[:, 0].mean())).mean() + 1e-3 * scores.square().mean()

    return loop(loss_of)


@odd(notes="directions of unit length, times a large fixed factor: the loss begins high by design")
def directions_times_a_large_factor() -> TrainLoop:
    def loss_of(scores, x, y):
        cosines = 64.0 * F.normalize(scores, dim=-1)
        return (cosines.logsumexp(-1) - cosines.gather(1, y[:, None]).squeeze(1)).mean()

    return loop(loss_of)
