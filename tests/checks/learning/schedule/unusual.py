"""Right loops whose rates or schedulers look wrong to some rule."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


def trained(optimizer, after, *, model, epochs=1, between=lambda: None, frozen=None):
    """The plain loop of a classifier: ``after`` follows each step, ``between`` each pass."""

    def fit(batches):
        for _ in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                after(loss)
            between()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, frozen=frozen)


def sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


@odd(notes="two LinearLR on one optimizer multiply, beside an optimizer of constant rate (two time scales)")
def two_linear_schedules_beside_a_constant_rate():
    trunk, head = mlp(6, 32, 16), nn.Linear(16, 3)
    slow = torch.optim.SGD(trunk.parameters(), lr=0.02)
    fast = torch.optim.SGD(head.parameters(), lr=0.1)
    rise = lr_scheduler.LinearLR(slow, 0.2, 1.0, total_iters=5)
    fall = lr_scheduler.LinearLR(slow, 1.0, 0.3, total_iters=400)

    def fit(batches):
        for x, y in batches:
            for optimizer in (slow, fast):
                optimizer.zero_grad()
            F.cross_entropy(head(trunk(x)), y).backward()
            for stepped in (slow, fast, rise, fall):
                stepped.step()

    return TrainLoop(model={"trunk": trunk, "head": head}, optimizer=[slow, fast], batch=data.labelled(), fit=fit)


@odd(notes="a schedule drives an optimizer that never steps: it computes the rates that a line writes to the real one")
def optimizer_as_a_rate_calculator():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    calculator = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.CosineAnnealingLR(calculator, T_max=300)

    def after(loss):
        schedule.step()
        for group in optimizer.param_groups:
            group["lr"] = calculator.param_groups[0]["lr"]

    return trained(optimizer, after, model=model)


@odd(notes="a key that is another name of an option is the project's own: its weight decay schedule reads it")
def decay_schedule_with_its_own_key():
    model = mlp(6, 32, 3)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "wd": 0.05}], lr=5e-3, weight_decay=0.0)
    steps = [0]

    def after(loss):
        steps[0] += 1
        for group in optimizer.param_groups:
            group["weight_decay"] = group["wd"] * min(1.0, steps[0] / 100)

    return trained(optimizer, after, model=model)


@odd(notes="the rate is written to a key for the log as well, beside the one that is read")
def rate_kept_for_the_log():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    steps = [0]

    def after(loss):
        steps[0] += 1
        for group in optimizer.param_groups:
            group["learning_rate"] = group["lr"] = 0.1 * 0.99 ** steps[0]

    return trained(optimizer, after, model=model)


@odd(notes="two steps at a rate of 0 warm up the moments before the first real one")
def moments_warmed_up_at_rate_zero():
    model = mlp(6, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    steps = [0]

    def after(loss):
        steps[0] += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if steps[0] < 3 else 5e-3

    return trained(optimizer, after, model=model)


@odd(notes="each stage has an optimizer and a schedule of its own")
def optimizer_of_each_stage():
    model = mlp(6, 32, 3)

    def fit(batches):
        optimizer = schedule = None
        for number, (x, y) in enumerate(batches):
            if number % 4 == 0:
                optimizer = sgd(model, 0.1 if number == 0 else 0.05)
                schedule = lr_scheduler.ExponentialLR(optimizer, 0.98)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()

    return TrainLoop(model=model, batch=data.labelled(), fit=fit)


@odd(notes="an inner optimizer is built for every task, on the weights that the loop has put back")
def inner_optimizer_of_each_task():
    model = mlp(6, 32, 3)

    def fit(batches):
        for x, y in batches:
            before = [p.detach().clone() for p in model.parameters()]
            inner = torch.optim.Adam(model.parameters(), lr=1e-2)
            inner.zero_grad()
            F.cross_entropy(model(x), y).backward()
            inner.step()
            with torch.no_grad():
                for p, start in zip(model.parameters(), before, strict=True):
                    p.copy_(start + 0.8 * (p - start))

    return TrainLoop(model=model, batch=data.labelled(), fit=fit)


@odd(notes="the second of two schedulers waits for its stage")
def averaging_schedule_that_waits():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    averaging = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    steps = [0]

    def after(loss):
        steps[0] += 1
        (averaging if steps[0] > 300 else cosine).step()

    return trained(optimizer, after, model=model)


@odd(notes="warm restarts are called with fractions of an epoch")
def restarts_in_fractions_of_an_epoch():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    restarts = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10)
    steps = [0]

    def after(loss):
        steps[0] += 1
        restarts.step(steps[0] / 50)

    return trained(optimizer, after, model=model)


@odd(notes="the reward is maximized: its plateau has mode max, and is given what is maximized")
def plateau_of_a_gain_that_is_maximized():
    model = mlp(6, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=20)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            gain = -F.cross_entropy(model(x), y)
            gain.backward()
            optimizer.step()
            plateau.step(gain.item())

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="an accuracy that stands still is given to the plateau at every pass")
def plateau_of_an_accuracy():
    model = mlp(6, 32, 3)
    optimizer = sgd(model, 0.05)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=30)
    return trained(optimizer, lambda loss: plateau.step(0.25), model=model)


@odd(notes="two lines call one scheduler, the first in the warm-up and the second after it")
def two_lines_call_in_turn():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    steps = [0]

    def after(loss):
        steps[0] += 1
        if steps[0] < 5:
            schedule.step()
        else:
            schedule.step()

    return trained(optimizer, after, model=model)


@odd(notes="one scheduler is called twice a step by one line: it is counted in half steps")
def scheduler_in_half_steps():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=800)

    def after(loss):
        for _ in range(2):
            schedule.step()

    return trained(optimizer, after, model=model)


@odd(notes="the rate is written by hand, to each group by its own rule: the head's stays as it is")
def cosine_by_hand_beside_a_constant_head():
    model = mlp(6, 32, 3)
    groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    steps = [0]

    def after(loss):
        steps[0] += 1
        trunk, _head = optimizer.param_groups
        trunk["lr"] = 0.05 * (1 + math.cos(math.pi * steps[0] / 300)) / 2

    return trained(optimizer, after, model=model)


@odd(notes="a recursive schedule is built anew for each pass, and goes on from the rate that stands")
def decay_built_for_each_step():
    model = mlp(6, 32, 3)
    optimizer = sgd(model)

    def after(loss):
        lr_scheduler.ExponentialLR(optimizer, 0.99).step()

    return trained(optimizer, after, model=model)


def plateaued(metric, mode):
    """A plateau scheduler that is given what ``metric`` makes of the loss."""
    model = mlp(6, 32, 3)
    optimizer = sgd(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, patience=10)
    return trained(optimizer, lambda loss: metric(scheduler, loss.item()), model=model)


@odd(notes="mode=min on an accuracy whose sign was turned")
def plateau_by_negative_accuracy():
    def step(scheduler, loss):
        val_acc = -1 / (1 + loss)
        scheduler.step(val_acc)

    return plateaued(step, "min")


@odd(notes="mode=max on a number that is called a loss and grows as the model gets better: a lower bound")
def plateau_by_negative_loss():
    def step(scheduler, loss):
        val_loss = -loss
        scheduler.step(val_loss)

    return plateaued(step, "max")


@odd(notes="a plateau scheduler has no rates of its own to be held against the declared plan")
def plateau_with_a_declared_plan():
    loop = plateaued(lambda scheduler, loss: scheduler.step(loss), "min")
    loop.steps, loop.epochs = 40, 4
    return loop


@odd(notes="the trunk is built with the rate 0, which freezes it, and a warm-up writes one rate into both groups")
def group_begins_at_zero():
    model = mlp(6, 16, 3)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[-1].parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups)

    steps = itertools.count(2)

    def one_rate(loss):
        rate = 1e-2 * min(1.0, next(steps) / 10)
        for group in optimizer.param_groups:
            group["lr"] = rate

    return trained(optimizer, one_rate, model=model)
