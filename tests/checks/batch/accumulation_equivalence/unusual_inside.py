"""What runs with every micro-batch and changes nothing, or is meant to follow the data."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.batch.accumulation_equivalence.faults_inside import (
    Towards,
    clip_norm,
    cool,
    decay,
    follow,
    windowed,
)
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


def as_knob(accumulate, make):
    return make(accumulate=accumulate)


@odd(notes="the norm of the gradient is logged with every micro-batch, by a clip to a limit that nothing reaches")
def norm_logged_with_every_micro_batch(accumulate=1) -> TrainLoop:
    norms = []

    def log(_i, model, _optimizer):
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))

    return as_knob(accumulate, windowed(each=log, once=clip_norm))


@odd(notes="a mask on the gradient of every micro-batch: what is zero stays zero in the sum")
def masks_with_every_micro_batch(accumulate=1) -> TrainLoop:
    def mask(_i, model, _optimizer):
        for p in model.parameters():
            p.grad.mul_((torch.arange(p.numel()).view(p.shape) % 3 != 0).to(p.dtype))

    return as_knob(accumulate, windowed(each=mask))


@odd(notes="the gradient of every micro-batch is centred: the sum of centred gradients is the centred sum")
def centred_with_every_micro_batch(accumulate=1) -> TrainLoop:
    def centre(_i, model, _optimizer):
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))

    return as_knob(accumulate, windowed(each=centre))


@odd(notes="hooks double the gradient of every backward pass, and the rate is half: linear in the micro-batches")
def hooks_that_scale(accumulate=1) -> TrainLoop:
    def net():
        model = mlp(6, 24, 3)
        for p in model.parameters():
            p.register_hook(lambda gradient: 2 * gradient)
        return model

    return as_knob(accumulate, windowed(net=net, rate=0.05))


@odd(notes="weights are clamped with every micro-batch, which do not move before the next step (a critic's bound)")
def weights_clamped_with_every_micro_batch(accumulate=1) -> TrainLoop:
    def clamp(_i, model, _optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.5, 0.5)

    return as_knob(accumulate, windowed(each=clamp))


@odd(notes="the average is updated at the start of every window, before the first micro-batch")
def average_before_the_window(accumulate=1) -> TrainLoop:
    return as_knob(accumulate, windowed(once=follow, net=Towards, loss=lambda model, x, y: model.loss(x, y)))


@odd(notes="decay by hand and a statistic of the loop, both once for each step, with a clip")
def decay_and_statistic_with_each_step(accumulate=1) -> TrainLoop:
    from tests.checks.batch.accumulation_equivalence.faults_inside import Scaled

    def once(i, model, optimizer):
        clip_norm(i, model, optimizer)
        decay(i, model, optimizer)

    return as_knob(accumulate, windowed(once=once, after=cool, net=Scaled))


@odd(notes="a spectral norm takes one step of its power iteration in every forward pass, as it always does")
def spectral_norm_under_accumulation(accumulate=1) -> TrainLoop:
    def net():
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 24)), nn.Tanh(), nn.Linear(24, 3))

    return as_knob(accumulate, windowed(net=net))


@odd(notes="a norm of the project's own keeps a running scale of each forward pass, as batch norms do")
def own_running_scale(accumulate=1) -> TrainLoop:
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(6, 24, 3)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            out = self.net(x) / self.scale.clone()
            if self.training:
                with torch.no_grad():
                    self.scale.mul_(0.9).add_(0.11)
            return out

    return as_knob(accumulate, windowed(net=Running))


@odd(notes="the scheduler steps with every micro-batch, and its horizon is their number: it ends with the data")
def schedule_over_all_micro_batches(accumulate=1) -> TrainLoop:
    model = mlp(6, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - 0.5 * (n // accumulate) / 20)
        for i, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if i % accumulate == 0 or i == len(batches):
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="the number of steps of the schedule is that of the data over the window: rates are to scale")
def schedule_to_scale_with_the_window(accumulate=1) -> TrainLoop:
    model = mlp(6, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 40 // accumulate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.1, 1 - n / steps))

    def fit(batches):
        for i, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if i % accumulate == 0 or i == len(batches):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="the rate follows from the window (the root of its length), and is constant")
def rate_by_the_root_of_the_window(accumulate=1) -> TrainLoop:
    return as_knob(accumulate, windowed(rate=0.05 * accumulate**0.5))


@odd(notes="the weight of a penalty grows with the data that was seen, counted in micro-batches")
def penalty_by_data_seen(accumulate=1) -> TrainLoop:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(6, 24, 3)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def loss(model, x, y):
        out = model.net(x)
        return F.cross_entropy(out, y) + 1e-3 * min(10, int(model.seen)) * out.square().mean()

    def count(_i, model, _optimizer):
        model.seen += 1

    return as_knob(accumulate, windowed(each=count, net=Counting, loss=loss))


@odd(notes="an optimizer that takes the sign of its momentum: rounding of a gradient near zero turns whole updates")
def signs_under_accumulation(accumulate=1) -> TrainLoop:
    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                        p.add_((0.9 * momentum + 0.1 * p.grad).sign_(), alpha=-group["lr"])
                        momentum.lerp_(p.grad, 0.01)

    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = Lion(model.parameters(), 1e-3)

    def fit(batches):
        for i, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if i % accumulate == 0 or i == len(batches):
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)
