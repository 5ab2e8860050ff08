"""Right loops whose schedules are longer, shorter or otherwise counted than a textbook has them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd

EPOCHS = 3


def trained(build, *, each="step", passes=EPOCHS, inside=False, accumulate=1, sgd=None, **fields):
    """A classifier's training under a schedule that is called once ``each`` step, micro-batch or pass."""
    model = mlp(6, 32, 3)
    optimizer = sgd(model) if sgd else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outside = None if inside else build(optimizer)

    def fit(batches):
        scheduler = build(optimizer, len(batches) * passes) if inside else outside
        number = 0
        for _ in range(passes):
            for x, y in batches:
                number += 1
                (F.cross_entropy(model(x), y) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    if each == "step":
                        scheduler.step()
                if each == "micro-batch":
                    scheduler.step()
            if each == "pass":
                scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, **fields)


@odd(notes="the rate is constant after its warm-up, for the whole of a long training")
def constant_after_warm_up():
    return trained(
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 40)), passes=1, steps=20_000
    )


@odd(notes="warm-up, a long constant part, and a decay over the last tenth")
def warm_up_stable_decay():
    def factor(step):
        return min(1.0, (step + 1) / 100, max(0.0, (5000 - step) / 500))

    return trained(lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor), passes=1, steps=5000)


@odd(notes="milestones far apart: the last one at three quarters of the training")
def milestones_in_steps():
    return trained(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [500, 750]), passes=1, steps=1000)


@odd(notes="a cosine that is cut at nine tenths, as for averaging over its last part")
def cosine_cut_short():
    return trained(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 1100), passes=1, steps=1000)


@odd(notes="a triangular cycle of 200 steps, whose rate is at its lowest again and again")
def cycles_through_the_training():
    return trained(
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=100), passes=1, steps=1000
    )


@odd(notes="the schedule counts epochs and is called once an epoch, beside a training of many steps")
def cosine_over_epochs_once_an_epoch():
    return trained(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 30), each="pass", epochs=30, steps=3000)


@odd(notes="a warm-up of as many steps as the training has epochs")
def warm_up_of_as_many_steps_as_epochs():
    return trained(
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=100), passes=1, steps=5000, epochs=100
    )


@odd(notes="warm-up of a fixed number of steps inside fit, whatever the number of batches: they may be few in a test")
def fixed_warm_up_inside_fit():
    def build(optimizer, calls):
        return lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 30) * max(0.05, 1 - n / (calls + 4000)))

    return trained(build, inside=True)


def linear_over(optimizer, calls):
    return lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=calls)


@odd(notes="sized by all micro-batches and called at each of them, whatever the window")
def sized_and_called_by_micro_batches(accumulate=1):
    return trained(linear_over, inside=True, each="micro-batch", accumulate=accumulate)


@odd(notes="built before fit for all micro-batches of the training, whose declared steps are whole windows")
def sized_and_called_by_declared_micro_batches(accumulate=1):
    return trained(
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4000),
        passes=1,
        each="micro-batch",
        accumulate=accumulate,
        steps=4000 // accumulate,
    )


@odd(notes="the rate is written before each micro-batch, as a share of all that there are")
def rate_written_by_share_of_micro_batches(accumulate=1):
    model = mlp(6, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fit(batches):
        total = EPOCHS * len(batches)
        for number in range(total):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (1 + math.cos(math.pi * number / total))
            x, y = batches[number % len(batches)]
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="sized by the steps of each window and called at each step")
def sized_by_windows(accumulate=1):
    return trained(
        lambda optimizer, calls: lr_scheduler.LinearLR(
            optimizer, 1.0, 0.01, total_iters=max(1, math.ceil(calls / accumulate))
        ),
        inside=True,
        accumulate=accumulate,
    )


@odd(notes="a number of steps that stays the same whatever the window: larger windows see more data")
def as_many_steps_whatever_the_window(accumulate=1):
    return trained(
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 1000), passes=1, accumulate=accumulate, steps=1000
    )


@odd(notes="a range test: the rate grows exponentially, and the training ends on the way")
def range_test_of_rates():
    return trained(
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1e-2 * 10 ** (min(n, 300) / 150)),
        passes=1,
        steps=200,
    )


@odd(notes="the critic steps five times for each step of the generator, whose schedule counts its own steps")
def schedule_of_every_fifth_step():
    model = torch.nn.ModuleDict({"often": mlp(6, 16, 3), "seldom": mlp(6, 16, 3)})
    often = torch.optim.SGD(model["often"].parameters(), lr=0.1)
    seldom = torch.optim.SGD(model["seldom"].parameters(), lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(seldom, 400)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            often.zero_grad()
            F.cross_entropy(model["often"](x), y).backward()
            often.step()
            if number % 5 == 0:
                seldom.zero_grad()
                F.cross_entropy(model["seldom"](x), y).backward()
                seldom.step()
                scheduler.step()

    return TrainLoop(model=model, optimizer=[often, seldom], batch=data.labelled(), fit=fit)


@odd(notes="one scheduler for each pass, made anew inside the loop over passes: a cycle for each of them")
def a_cycle_for_each_pass():
    model = mlp(6, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fit(batches):
        for _ in range(EPOCHS):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = 0.1
            scheduler = lr_scheduler.CosineAnnealingLR(optimizer, len(batches), eta_min=0.01)
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a frozen group keeps rate 0 for the whole training, and is declared frozen")
def group_of_no_rate_declared_frozen():
    def sgd(model):
        return torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)

    def build(optimizer):
        return lr_scheduler.LambdaLR(optimizer, [lambda n: 0.0, lambda n: max(0.1, 1 - n / 1000)])

    return trained(build, sgd=sgd, passes=1, steps=1000, frozen=("0.",))
