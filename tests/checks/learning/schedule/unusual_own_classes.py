"""Schedulers that do not inherit from torch's and have no step(): the rates that they write are read in the groups."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


class CosineByUpdates:
    """As timm's schedulers that count updates are driven: by ``step_update`` alone."""

    def __init__(self, optimizer, t_initial, warmup_t=3, lr_min=1e-4):
        self.optimizer, self.t_initial, self.warmup_t, self.lr_min = optimizer, t_initial, warmup_t, lr_min
        self.base_values = [group["lr"] for group in optimizer.param_groups]

    def _get_lr(self, t):
        if t < self.warmup_t:
            return [self.lr_min + t * (v - self.lr_min) / self.warmup_t for v in self.base_values]
        part = min(1.0, t / self.t_initial)
        return [self.lr_min + 0.5 * (v - self.lr_min) * (1 + math.cos(math.pi * part)) for v in self.base_values]

    def step_update(self, num_updates, metric=None):
        for group, value in zip(self.optimizer.param_groups, self._get_lr(num_updates), strict=True):
            group["lr"] = value

    def state_dict(self):
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state):
        vars(self).update(state)


class Annealed:
    """A schedule of the project's own that is told the epoch, and is given the optimizer for each call."""

    def __init__(self, first, factor):
        self.first, self.factor = first, factor

    def adjust(self, optimizer, epoch):
        for group in optimizer.param_groups:
            group["lr"] = self.first * self.factor**epoch


def loop(make_scheduler, drive, **declared):
    model = mlp(6, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make_scheduler(optimizer)

    def fit(batches, epochs=3):
        updates = 0
        for epoch in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                updates += 1
                drive(scheduler, optimizer, updates, epoch)

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batch=data.labelled(), fit=fit, **declared)


@odd(notes="the declared scheduler has step_update() and no step() (timm)")
def scheduler_driven_by_updates():
    return loop(lambda optimizer: CosineByUpdates(optimizer, 200), lambda s, _o, n, _e: s.step_update(num_updates=n))


@odd(notes="the declared scheduler knows no optimizer: it is handed one with each call")
def scheduler_that_is_handed_the_optimizer():
    return loop(lambda _optimizer: Annealed(0.1, 0.9), lambda s, o, _n, epoch: s.adjust(o, epoch))
