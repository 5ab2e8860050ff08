"""Losses that are written by hand, far above what they are for outputs that say nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


def loop(std, loss_of):
    def make():
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
        nn.init.normal_(model[2].weight, std=std)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


def focal(scores, y):
    logs = scores.log_softmax(-1)
    return (-((1 - logs.exp()) ** 2) * logs).gather(1, y[:, None]).mean()


def squared(scores, y):
    return (scores - F.one_hot(y, 3)).square().mean()


pair(
    "focal_loss_by_hand_of_wide_scores",
    "loss_at_init",
    "too_high",
    culprits=("2.weight",),
    where="loss.backward()",
    faulty=loop(20.0, focal),
    fixed=loop(0.02, focal),
)
pair(
    "squares_by_hand_of_wide_outputs",
    "loss_at_init",
    "too_high",
    culprits=("2.weight",),
    where="loss.backward()",
    faulty=loop(20.0, squared),
    fixed=loop(0.02, squared),
)
