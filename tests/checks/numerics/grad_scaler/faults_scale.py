"""Loss scales that never adapt, or fall without end."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.checks.numerics.grad_scaler.faults_clips_and_updates import clip, tabular_net
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# A step function that builds all it needs.


def anew_in_each_step(model, optimizer, batches, init_scale, *, keep):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    for x, y in batches:
        if not keep:
            scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y, reduction="sum")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()


def anew(keep, init_scale):
    def make():
        model = tabular_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: anew_in_each_step(model, optimizer, batches, init_scale, keep=keep),
        )

    return make


pair(
    "scaler_made_in_each_step_and_always_too_high",
    "grad_scaler",
    "scaler_recreated",
    faulty=anew(keep=False, init_scale=2.0**20),
    fixed=anew(keep=True, init_scale=2.0**20),
)
pair(
    "scaler_made_in_each_step",
    "grad_scaler",
    "scaler_recreated",
    level="advice",
    change='torch.amp.GradScaler("cpu"',
    faulty=anew(keep=False, init_scale=2.0**8),
    fixed=anew(keep=True, init_scale=2.0**8),
)


# Twins at no distance: the slope of a root at zero, now and then or always.


def train_metric(model, optimizer, scaler, batches, eps):
    for left, right, same in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            gap = (model(left) - model(right)).float().square().sum(dim=1)
        distance = (gap + eps).sqrt()
        loss = torch.where(same, distance, F.relu(1.0 - distance)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def twins(n, every):
    batches = []
    for i in range(n):
        drawn = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
        same = torch.arange(8) % 2 == 0
        other = torch.where(same[:, None], drawn + 0.1, drawn.roll(1, 0))
        if every and i % every == every - 1:
            other[0] = drawn[0]
        batches.append((drawn, other, same))
    return batches


def metric(eps, every):
    def make():
        model = mlp(6, 24, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=twins(1, 0)[0] if every > 1 else twins(1, 1)[0],
            batches=lambda n: twins(n, every),
            fit=lambda batches: train_metric(model, optimizer, scaler, batches, eps),
        )

    return make


pair(
    "identical_twins_in_every_fourth_batch",
    "grad_scaler",
    "scale_collapsed",
    where="distance = (gap + eps).sqrt()",
    faulty=metric(0.0, every=4),
    fixed=metric(1e-8, every=4),
)
pair(
    "identical_twins_in_every_batch",
    "grad_scaler",
    "scale_collapsed",
    where="distance = (gap + eps).sqrt()",
    faulty=metric(0.0, every=1),
    fixed=metric(1e-8, every=1),
)
