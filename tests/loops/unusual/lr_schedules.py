"""Learning rates that start at 0, come from nowhere, or restart; weights that are averaged on the side."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def classification_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train_with(model, optimizer, scheduler, batches):
    for batch in batches:
        optimizer.zero_grad()
        classification_loss(model, batch).backward()
        optimizer.step()
        scheduler.step()


@odd(notes="the first step has rate 0 and moves nothing (linear warm-up)")
def warmup_from_rate_zero() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 6))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=points(),
        batches=fresh(points),
        loss=classification_loss,
        fit=lambda batches: train_with(model, optimizer, scheduler, batches),
    )


def train_one_cycle(model, optimizer, batches):
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=len(batches))
    train_with(model, optimizer, scheduler, batches)


@odd(
    notes="the scheduler is made inside fit, for exactly as many steps as there are batches; it also moves the momentum"
)
def one_cycle_made_inside_fit() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_one_cycle(model, optimizer, batches),
    )


def train_skipping_rate_zero(model, optimizer, scheduler, batches):
    scheduler.step()  # leaves the rate 0 of the warm-up before anything is trained
    train_with(model, optimizer, scheduler, batches)


@odd(notes="the scheduler steps once before any optimizer step, on purpose: the warm-up starts at 1/5 and not at 0")
def scheduler_stepped_once_before_the_loop() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_skipping_rate_zero(model, optimizer, scheduler, batches),
    )


def rate_at(step, peak=1e-2, floor=1e-3, warmup=4, decay=40):
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step > decay:
        return floor
    return floor + 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (decay - warmup))) * (peak - floor)


def train_hand_written_rate(model, optimizer, batches):
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step) * group["scale"]
        classification_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@odd(notes="no scheduler: the rate is written into the groups before each step, with a scale per group")
def hand_written_cosine_rate() -> TrainLoop:
    model = relu_mlp(8, 16, 16, 4)
    groups = [{"params": layer.parameters(), "scale": 0.8**i} for i, layer in enumerate(reversed(model[::2]))]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_hand_written_rate(model, optimizer, batches),
    )


class Both:
    def __init__(self, *schedulers):
        self.schedulers = schedulers

    def step(self):
        for scheduler in self.schedulers:
            scheduler.step()


@odd(notes="two schedulers over one optimizer, both stepped at every step; their factors multiply")
def two_chained_schedulers() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.98), lr_scheduler.MultiStepLR(optimizer, [10, 20], gamma=0.5)]
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=schedulers,
        batch=points(),
        fit=lambda batches: train_with(model, optimizer, Both(*schedulers), batches),
    )


@odd(notes="warm-up, then cosine, joined by SequentialLR, which steps its parts while it is being built")
def sequential_warmup_then_cosine() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=100),
    ]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_with(model, optimizer, scheduler, batches),
    )


class EMA:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)
        self.backup = None

    @torch.no_grad()
    def update(self):
        for kept, live in zip(self.shadow.parameters(), self.model.parameters(), strict=True):
            kept.lerp_(live, 1 - self.decay)

    def swap_in(self):
        self.backup = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.shadow.state_dict())

    def restore(self):
        self.model.load_state_dict(self.backup)


def train_with_ema(model, optimizer, ema, batches, heldout, evaluate_every=8):
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        classification_loss(model, batch).backward()
        optimizer.step()
        ema.update()
        if step % evaluate_every == 0:
            ema.swap_in()
            with torch.no_grad():
                classification_loss(model, heldout).item()
            ema.restore()


@odd(notes="for evaluation the live weights are replaced by their average and put back bit for bit")
def ema_swapped_in_for_evaluation() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ema, heldout = EMA(model), points()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_with_ema(model, optimizer, ema, batches, heldout),
    )


class WithAverage(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = relu_mlp(8, 16, 4)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def forward(self, x):
        return self.net(x) if self.training else self.average(x)


@odd(notes="the declared model contains its own average as a registered submodule that nobody optimises")
def average_registered_inside_the_model() -> TrainLoop:
    model = WithAverage()
    optimizer = torch.optim.Adam(model.net.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.average.update_parameters(model.net)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


def train_with_rollback(model, optimizer, batches, heldout, every=3, worse=1.1):
    best, kept, rate = math.inf, None, optimizer.param_groups[0]["lr"]
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        classification_loss(model, batch).backward()
        optimizer.step()
        if step % every != 0:
            continue
        with torch.no_grad():
            value = classification_loss(model, heldout).item()
        if value < best:
            best, kept = value, copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        elif value > worse * best + 0.02:
            rate *= 0.5
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            optimizer.param_groups[0]["lr"] = rate


@odd(notes="weights and optimizer state jump back to the best point where a held-out loss got worse, at half the rate")
def rollback_when_the_loss_gets_worse() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    heldout = points()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_with_rollback(model, optimizer, batches, heldout),
    )
