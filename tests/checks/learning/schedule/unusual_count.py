"""Right loops that call schedulers from two lines, begin schedules anew, or bring a rate to 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


def over_passes(optimizer, model, *, each_step, each_pass, epochs=3):
    """``each_step`` is called with the number of the pass and of the batch, ``each_pass`` with that of the pass."""

    def fit(batches):
        for epoch in range(epochs):
            for number, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                each_step(epoch, number)
            each_pass(epoch)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


def sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


@odd(notes="a warm-up counts steps, and another scheduler counts passes")
def two_schedulers_of_two_units():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8)
    decay = lr_scheduler.MultiStepLR(optimizer, milestones=[16, 22], gamma=0.1)
    return over_passes(
        optimizer, model, each_step=lambda epoch, number: warm_up.step(), each_pass=lambda epoch: decay.step()
    )


@odd(notes="the first pass counts in steps, and all others in passes: one lambda knows where it stands")
def steps_in_the_first_pass_only():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda call: min(1.0, (call + 1) / 8))

    def each_step(epoch, number):
        if epoch == 0:
            scheduler.step()

    return over_passes(optimizer, model, each_step=each_step, each_pass=lambda epoch: scheduler.step())


@odd(notes="the schedule of steps is set back at the end of each pass, to an epoch that is given")
def position_set_at_the_end_of_each_pass():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    return over_passes(
        optimizer, model, each_step=lambda epoch, number: scheduler.step(), each_pass=lambda epoch: scheduler.step(0)
    )


@odd(notes="each cycle has a scheduler of its own, which is built after the rate was put back from 0")
def cycles_that_put_the_rate_back():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    state = {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 4), "calls": 0}

    def each_step(epoch, number):
        state["scheduler"].step()
        state["calls"] += 1
        if state["calls"] % 4 == 0:
            optimizer.param_groups[0]["lr"] = 0.08
            state["scheduler"] = lr_scheduler.CosineAnnealingLR(optimizer, 4)

    return over_passes(optimizer, model, each_step=each_step, each_pass=lambda epoch: None)


@odd(notes="a factor of 0 stops the encoder after a few steps, while the head goes on")
def factor_that_stops_one_of_two():
    encoder, head = mlp(6, 32, 16), nn.Linear(16, 3)
    first, second = sgd(encoder), sgd(head)
    scheduler = lr_scheduler.StepLR(first, step_size=4, gamma=0)

    def fit(batches):
        for x, y in batches:
            first.zero_grad()
            second.zero_grad()
            F.cross_entropy(head(encoder(x)), y).backward()
            first.step()
            second.step()
            scheduler.step()

    model = nn.Sequential(encoder, head)
    return TrainLoop(model=model, optimizer=[first, second], batch=data.labelled(), fit=fit)


@odd(notes="a floor above the base rate of OneCycleLR, below its peak, holds through the first steps")
def floor_of_one_cycle():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2000, cycle_momentum=False)

    def floor():
        for group in optimizer.param_groups:
            group["lr"] = max(group["lr"], 0.02)

    floor()

    def each_step(epoch, number):
        scheduler.step()
        floor()

    return over_passes(optimizer, model, each_step=each_step, each_pass=lambda epoch: None, epochs=1)


@odd(notes="a window of two micro-batches, and a cosine sized for micro-batches that is called for each of them")
def cosine_of_micro_batches():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=600)

    def fit(batches):
        for number, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(model(x), y) / 2).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, steps=300)


@odd(notes="a warm-up by hand moves the groups that were there first; the one that is added keeps a rate of its own")
def added_group_beside_a_schedule_by_hand():
    trunk, head = mlp(6, 32, 16), nn.Linear(16, 3)
    trunk.requires_grad_(False)
    optimizer = sgd(head, 0.05)
    first = list(optimizer.param_groups)
    state = {"steps": 0}

    def fit(batches):
        for x, y in batches:
            if state["steps"] == 3:
                trunk.requires_grad_(True)
                optimizer.add_param_group({"params": list(trunk.parameters()), "lr": 0.001})
            optimizer.zero_grad()
            F.cross_entropy(head(trunk(x)), y).backward()
            optimizer.step()
            state["steps"] += 1
            for group in first:
                group["lr"] = 0.05 * 0.98 ** state["steps"]

    model = nn.Sequential(trunk, head)
    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)
