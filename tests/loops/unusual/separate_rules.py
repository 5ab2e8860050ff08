"""Optimizers, divisors and norms that go by rules of their own beside what trains."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import images, points


@odd(notes="the summed loss is divided by the batch size of the settings: right for micro-batches of that size")
def apart_divided_by_a_constant(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch_size = 12

    def fit(batches):
        for i, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(model(x), y, reduction="sum") / (batch_size * accumulate)).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="an online probe on detached features steps with every micro-batch, the trunk at the end of the window")
def apart_probe_steps_with_each(accumulate=1):
    model, probe = relu_mlp(8, 16, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_probe = torch.optim.SGD(probe.parameters(), lr=0.1)

    def fit(batches):
        for i, (x, y) in enumerate(batches, start=1):
            features = model(x)
            (F.cross_entropy(features, y) / accumulate).backward()
            by_probe.zero_grad()
            F.cross_entropy(probe(features.detach()), y).backward()
            by_probe.step()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=[model, probe], optimizer=[optimizer, by_probe], batch=points(12), fit=fit)


class Gathering(torch.optim.Optimizer):
    """Called with every micro-batch, and moves the weights with every k-th (as Horovod's and optax's MultiSteps)."""

    def __init__(self, params, lr, every):
        super().__init__(params, {"lr": lr})
        self.every, self.calls = every, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("total", torch.zeros_like(p))
                total.add_(p.grad, alpha=1 / self.every)
                if self.calls % self.every == 0:
                    p.sub_(total, alpha=group["lr"])
                    total.zero_()


@odd(notes="the optimizer gathers gradients inside: most calls of step() move nothing")
def apart_optimizer_that_gathers(accumulate=1):
    model = relu_mlp(8, 16, 4)
    optimizer = Gathering(model.parameters(), 0.1, accumulate)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="an own optimizer that gathers 100 gradients before it moves anything")
def apart_optimizer_that_waits():
    model = relu_mlp(8, 16, 4)
    optimizer = Gathering(model.parameters(), 0.1, 100)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


def train_images(model, batches):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for x, y in batches:
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@odd(notes="a batch norm's gain and shift stay at one and zero, and what is before it trains: statistics must follow")
def apart_norm_without_gain():
    norm = nn.BatchNorm2d(6).requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(216, 4))
    return TrainLoop(model=model, batch=images(), fit=lambda batches: train_images(model, batches))


@odd(notes="an adapter before a frozen trunk: what comes into the trunk's norms changes, and their statistics with it")
def apart_adapter_before_frozen_norms():
    trunk = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()).requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(1, 1, 1), trunk, nn.Linear(216, 4))
    return TrainLoop(model=model, batch=images(), fit=lambda batches: train_images(model, batches))


class Checkpointed(nn.Module):
    """Saves memory in training mode; the values are the same."""

    def __init__(self):
        super().__init__()
        self.body = relu_mlp(8, 16, 4)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.training else self.body(x)


@odd(notes="validated in training mode, which only switches checkpointing on: the values are the same in both modes")
def apart_mode_that_changes_no_value():
    model = Checkpointed()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out, labels = points(12)

    def fit(batches):
        for i, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if i % 3 == 2:
                with torch.no_grad():
                    F.cross_entropy(model(held_out), labels).item()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="the uncertainty of a held-out set by eight passes with dropout on: sampling needs training mode")
def apart_samples_by_dropout():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out, labels = points(12)

    def fit(batches):
        for i, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if i % 3 == 2:
                with torch.no_grad():
                    mean = torch.stack([model(held_out).softmax(-1) for _ in range(8)]).mean(0)
                    F.nll_loss(mean.log(), labels).item()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


class Detector(nn.Module):
    """Gives losses in training mode and boxes in evaluation mode, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x, boxes=None):
        found = self.body(x)
        return {"loss_box": F.l1_loss(found, boxes)} if self.training else found


@odd(notes="the validation loss of a detector is measured in training mode: in the other it gives boxes and no loss")
def apart_losses_in_training_mode_only():
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out = torch.randn(6, 8), torch.rand(6, 4)

    def fit(batches):
        for i, (x, boxes) in enumerate(batches):
            optimizer.zero_grad()
            sum(model(x, boxes).values()).backward()
            optimizer.step()
            if i % 3 == 2:
                with torch.no_grad():
                    sum(model(*held_out).values()).item()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(12, 8), torch.rand(12, 4)), fit=fit)


@odd(notes="the trunk's optimizer waits for 500 steps of the head, and is zeroed all the same")
def apart_optimizer_that_waits_for_its_turn():
    trunk, head = relu_mlp(8, 16), nn.Linear(16, 4)
    by_trunk = torch.optim.SGD(trunk.parameters(), lr=0.05)
    by_head = torch.optim.SGD(head.parameters(), lr=0.05)

    def fit(batches):
        for i, (x, y) in enumerate(batches):
            by_trunk.zero_grad()
            by_head.zero_grad()
            F.cross_entropy(head(trunk(x)), y).backward()
            by_head.step()
            if i >= 500:
                by_trunk.step()

    return TrainLoop(model=[trunk, head], optimizer=[by_trunk, by_head], batch=points(12), fit=fit)
