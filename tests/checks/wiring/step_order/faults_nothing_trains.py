"""Loops in which nothing trains: a flag that is off, an exception that is swallowed, a step that was never written."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import ConvNet, mlp
from tests.loops.pairs import pair

log = logging.getLogger(__name__)

# A trainer whose `training_step` only reports the loss: the update went with a refactor.


class Trainer:
    def __init__(self, model, optimizer, updates):
        self.model, self.optimizer, self.updates = model, optimizer, updates
        self.history = []

    def training_step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        if self.updates:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def fit(self, batches):
        self.model.train()
        for x, y in batches:
            self.history.append(self.training_step(x, y))


def trainer(updates):
    def make():
        model = mlp(8, 16, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = torch.randn(16, 8), torch.randint(0, 4, (16,))
        return TrainLoop(
            model=model, optimizer=optimizer, batch=batch, fit=Trainer(model, optimizer, updates=updates).fit
        )

    return make


pair(
    "update_behind_a_flag_that_is_off",
    "step_order",
    "nothing_trains",
    where="loss.backward()",
    quick=True,
    faulty=trainer(updates=False),
    fixed=trainer(updates=True),
)


# Bad batches are left out; since the images come as (N, H, W, C), every batch is a bad one.


def train_leaving_out_bad_batches(model, optimizer, batches):
    for images, labels in batches:
        try:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            log.debug("left out a batch: %s", error)


def images(channels_last):
    def make():
        model = ConvNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x, y = data.images()
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=(x.movedim(1, -1).contiguous() if channels_last else x, y),
            fit=lambda batches: train_leaving_out_bad_batches(model, optimizer, batches),
        )

    return make


pair(
    "every_batch_left_out_as_bad",
    "step_order",
    "nothing_trains",
    faulty=images(channels_last=True),
    fixed=images(channels_last=False),
)


# Neither optimizer nor update: backward fills .grad, and that is all.


def train_by_hand(model, batches, lr):
    for x, y in batches:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        if lr:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(lr * p.grad)


def regression(lr):
    def make():
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        x = torch.randn(16, 4)
        return TrainLoop(
            model=model,
            batch=(x, x.sum(1, keepdim=True)),
            fit=lambda batches: train_by_hand(model, batches, lr),
        )

    return make


pair(
    "backward_and_no_optimizer",
    "step_order",
    "step_missing",
    where="backward()",
    faulty=regression(0.0),
    fixed=regression(0.1),
)
