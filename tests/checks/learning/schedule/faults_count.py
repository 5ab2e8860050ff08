"""Schedules that two lines count on, that begin anew at 0, or that a line writes over at their own peak."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


class Detector:
    """A training by functions: one of an epoch, which is given the scheduler, and one of all epochs."""

    def __init__(self, each_step, each_epoch, epochs=3):
        self.each_step, self.each_epoch, self.epochs = each_step, each_epoch, epochs
        self.model = mlp(6, 32, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, milestones=[16, 22], gamma=0.1)

    def train_one_epoch(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            if self.each_step:
                self.scheduler.step()

    def fit(self, batches):
        for _ in range(self.epochs):
            self.train_one_epoch(batches)
            if self.each_epoch:
                self.scheduler.step()


def detector(**how):
    def make():
        trainer = Detector(**how)
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.labelled(), fit=trainer.fit)

    return make


pair(
    "called_in_the_epoch_and_after_it",
    "schedule",
    "called_twice",
    culprits=("MultiStepLR.step()",),
    where="self.scheduler.step()",
    faulty=detector(each_step=True, each_epoch=True),
    fixed=detector(each_step=False, each_epoch=True),
)


class Restarts:
    """Cycles of a cosine, each with a scheduler of its own."""

    def __init__(self, cycle, restore):
        self.cycle, self.restore, self.number = cycle, restore, 0
        self.model = mlp(6, 32, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, self.cycle)

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.number += 1
            if self.number % self.cycle == 0:
                if self.restore:
                    for group in self.optimizer.param_groups:
                        group["lr"] = group["initial_lr"]
                self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, self.cycle)


def restarts(**how):
    def make():
        trainer = Restarts(cycle=4, **how)
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.labelled(), fit=trainer.fit)

    return make


pair(
    "restart_from_the_rate_of_zero",
    "schedule",
    "zero_for_good",
    culprits=("CosineAnnealingLR",),
    change="self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, self.cycle)",
    faulty=restarts(restore=False),
    fixed=restarts(restore=True),
    quick=True,
)


def plain(build, *, before=lambda optimizer: None):
    """The plain loop under one scheduler; ``before`` is called before each step."""

    def make():
        model = mlp(6, 32, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = build(optimizer)

        def fit(batches):
            for x, y in batches:
                before(optimizer)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "schedule_switched_off_by_gamma_zero",
    "schedule",
    "zero_for_good",
    culprits=("gamma",),
    where="scheduler.step()",
    faulty=plain(lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=4, gamma=0)),
    fixed=plain(lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=4, gamma=1)),
)


def configured(optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.1


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2000, cycle_momentum=False)


pair(
    "peak_of_one_cycle_written_before_each_step",
    "schedule",
    "schedule_overwritten",
    culprits=("OneCycleLR.step()",),
    where='group["lr"] = 0.1',
    change='group["lr"] = 0.1',
    faulty=plain(one_cycle, before=configured),
    fixed=plain(one_cycle),
)
