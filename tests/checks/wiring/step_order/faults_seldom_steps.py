"""A step whose condition is turned round, or never holds again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# A trainer with a knob: the remainder is taken for "the window is full".


class Trainer:
    def __init__(self, model, accumulate):
        self.model, self.accumulate = model, accumulate
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def due(self, index):
        return (index + 1) % self.accumulate == 0

    def fit(self, batches):
        self.optimizer.zero_grad()
        for index, (x, y) in enumerate(batches):
            loss = F.cross_entropy(self.model(x), y) / self.accumulate
            loss.backward()
            if self.due(index):
                self.optimizer.step()
                self.optimizer.zero_grad()


class TrainerWithTurnedCondition(Trainer):
    def fit(self, batches):
        self.optimizer.zero_grad()
        for index, (x, y) in enumerate(batches):
            loss = F.cross_entropy(self.model(x), y) / self.accumulate
            loss.backward()
            if (index + 1) % self.accumulate:
                self.optimizer.step()
                self.optimizer.zero_grad()


def accumulating(trainer, default):
    def build(accumulate):
        made = trainer(mlp(8, 24, 3), accumulate)
        return TrainLoop(model=made.model, optimizer=made.optimizer, batch=data.labelled(features=8), fit=made.fit)

    def by_four(accumulate=4):
        return build(accumulate)

    def by_one(accumulate=1):
        return build(accumulate)

    return by_four if default == 4 else by_one


pair(
    "step_on_the_remainder",
    "step_order",
    "step_missing",
    where="loss.backward()",
    faulty=accumulating(TrainerWithTurnedCondition, 4),
    fixed=accumulating(Trainer, 4),
)


# Batches without labelled rows bring no gradient: the guard that passes over one of them is never lifted.


class SemiSupervised:
    """Every fourth batch has no labels at all."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.ready = True

    def update(self):
        self.ready = all(p.grad is not None for p in self.model.parameters())
        if self.ready:
            self.optimizer.step()

    def fit(self, batches):
        for number, (x, y) in enumerate(batches):
            self.optimizer.zero_grad()
            if number % 4 != 3:
                F.cross_entropy(self.model(x), y).backward()
            self.update()


class SemiSupervisedStuck(SemiSupervised):
    def update(self):
        if any(p.grad is None for p in self.model.parameters()):
            self.ready = False
        if self.ready:
            self.optimizer.step()


def semi_supervised(trainer):
    def make():
        made = trainer()
        return TrainLoop(model=made.model, optimizer=made.optimizer, batch=data.labelled(features=8), fit=made.fit)

    return make


pair(
    "never_ready_again",
    "step_order",
    "step_missing",
    where="F.cross_entropy(self.model(x), y).backward()",
    faulty=semi_supervised(SemiSupervisedStuck),
    fixed=semi_supervised(SemiSupervised),
)
