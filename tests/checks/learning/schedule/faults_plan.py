"""Schedules that are too long or too short for the training, or counted in another unit than they are called in."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, lm_loss, mlp
from tests.loops.pairs import pair

EPOCHS = 3


def trained(build, *, each="step", passes=EPOCHS, inside=False, **fields):
    """A classifier's training. ``build(optimizer, calls)`` makes the schedule; it is called once ``each`` step or pass,
    and made by ``fit`` itself for its own batches where ``inside``."""

    def make():
        model = mlp(6, 32, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        outside = None if inside else build(optimizer)

        def fit(batches):
            scheduler = build(optimizer, len(batches), passes) if inside else outside
            for _ in range(passes):
                for x, y in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    if each == "step":
                        scheduler.step()
                if each == "pass":
                    scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, **fields)

    return make


def cosine_in(calls):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=calls)


def warmed_up(steps, total):
    """Linear up and linear down, as most guides to transformers write it."""

    def factor(step):
        if step < steps:
            return (step + 1) / steps
        return max(0.0, (total - step) / max(1, total - steps))

    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)


# The unit that a schedule is built for, and the one that it is called in.

pair(
    "cosine_over_epochs_at_each_step",
    "schedule",
    "counts_something_else",
    culprits=("CosineAnnealingLR",),
    where="scheduler.step()",
    faulty=trained(cosine_in(EPOCHS)),
    fixed=trained(cosine_in(EPOCHS), each="pass"),
    quick=True,
)


class Pretraining:
    """A language model, its windows of micro-batches, and a schedule that warms up and decays."""

    def __init__(self, accumulate, total, *, each_batch, micro_batches):
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.accumulate, self.each_batch = accumulate, each_batch
        length = total if micro_batches else total // accumulate
        self.scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / length))
        self.length = length

    def fit(self, batches):
        for number, batch in enumerate(batches, start=1):
            (lm_loss(self.model, batch) / self.accumulate).backward()
            last = number % self.accumulate == 0 or number == len(batches)
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if last or self.each_batch:
                self.scheduler.step()


def pretrained(*, each_batch, micro_batches, declared=False):
    def make(accumulate=1):
        training = Pretraining(accumulate, 4000, each_batch=each_batch, micro_batches=micro_batches)
        return TrainLoop(
            model=training.model,
            optimizer=training.optimizer,
            batch=data.tokens(),
            fit=training.fit,
            steps=4000 // accumulate if declared else None,
        )

    return make


def in_windows_of_two(*, each_batch):
    """Windows that no knob changes."""

    def make():
        training = Pretraining(2, 4000, each_batch=each_batch, micro_batches=False)
        return TrainLoop(model=training.model, optimizer=training.optimizer, batch=data.tokens(), fit=training.fit)

    return make


pair(
    "decay_of_micro_batches_at_each_step",
    "schedule",
    "counts_something_else",
    where="self.scheduler.step()",
    faulty=pretrained(each_batch=False, micro_batches=True, declared=True),
    fixed=pretrained(each_batch=False, micro_batches=False, declared=True),
)

pair(
    "scheduler_in_the_branch_of_the_batch",
    "schedule",
    "per_micro_batch",
    level="advice",
    where="self.scheduler.step()",
    faulty=in_windows_of_two(each_batch=True),
    fixed=in_windows_of_two(each_batch=False),
    quick=True,
)


# The length of the schedule, and that of the training.

pair(
    "cosine_over_the_first_pass",
    "schedule",
    "rises_again",
    level="advice",
    where="scheduler.step()",
    faulty=trained(lambda optimizer, batches, epochs: lr_scheduler.CosineAnnealingLR(optimizer, batches), inside=True),
    fixed=trained(
        lambda optimizer, batches, epochs: lr_scheduler.CosineAnnealingLR(optimizer, batches * epochs), inside=True
    ),
)

pair(
    "one_cycle_for_one_epoch",
    "schedule",
    "runs_out",
    where="scheduler.step()",
    change="OneCycleLR",
    raises="Tried to step",
    faulty=trained(
        lambda optimizer, batches, epochs: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=batches), inside=True
    ),
    fixed=trained(
        lambda optimizer, batches, epochs: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=batches * epochs),
        inside=True,
    ),
)

pair(
    "one_cycle_shorter_than_the_plan",
    "schedule",
    "runs_out",
    faulty=trained(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=500), steps=600, passes=1),
    fixed=trained(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=600), steps=600, passes=1),
    quick=True,
)

pair(
    "warm_up_longer_than_the_training",
    "schedule",
    "ends_in_warmup",
    where="scheduler.step()",
    faulty=trained(warmed_up(2000, 20000), steps=500, passes=1),
    fixed=trained(warmed_up(50, 500), steps=500, passes=1),
    quick=True,
)

pair(
    "decay_over_the_first_pass",
    "schedule",
    "over_too_early",
    where="scheduler.step()",
    faulty=trained(
        lambda optimizer, batches, epochs: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=batches), inside=True
    ),
    fixed=trained(
        lambda optimizer, batches, epochs: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=batches * epochs),
        inside=True,
    ),
)

pair(
    "decay_over_a_third_of_the_plan",
    "schedule",
    "over_too_early",
    faulty=trained(warmed_up(20, 400), steps=1200, passes=1),
    fixed=trained(warmed_up(20, 1200), steps=1200, passes=1),
    quick=True,
)

pair(
    "cosine_past_its_lowest_point",
    "schedule",
    "rises_again",
    level="advice",
    where="scheduler.step()",
    faulty=trained(cosine_in(300), steps=600, passes=1),
    fixed=trained(cosine_in(600), steps=600, passes=1),
    quick=True,
)

pair(
    "cosine_that_barely_begins",
    "schedule",
    "barely_begun",
    level="advice",
    where="scheduler.step()",
    faulty=trained(cosine_in(5000), steps=600, passes=1),
    fixed=trained(cosine_in(600), steps=600, passes=1),
    quick=True,
)


def by_group(head_factor):
    """A trunk and a head, each with its own factor."""

    def make():
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1, momentum=0.9
        )
        scheduler = lr_scheduler.LambdaLR(optimizer, [lambda step: math.exp(-step / 2000), head_factor])

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, steps=800)

    return make


pair(
    "head_that_warms_up_after_the_end",
    "schedule",
    "group_at_zero",
    culprits=("2.weight",),
    where="scheduler.step()",
    faulty=by_group(lambda step: float(step // 1000)),
    fixed=by_group(lambda step: min(1.0, (step + 1) / 100)),
)
