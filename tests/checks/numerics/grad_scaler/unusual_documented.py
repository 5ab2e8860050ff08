"""Gradient scalers as their documentation shows them: skipped steps, two optimizers, penalties on gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def train_with_schedule(model, optimizer, scheduler, scaler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


@odd(
    notes="the scaler skips the first steps while the scheduler goes on, so the scheduler steps before the optimizer "
    "ever did, in a loop that has them in the right order"
)
def scheduler_beside_a_scaler_that_skips() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        batch=points(),
        fit=lambda batches: train_with_schedule(model, optimizer, scheduler, scaler, batches),
    )


def train_two_heads(trunk, heads, optimizers, scaler, batches):
    for x, y, aim in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = trunk(x)
            losses = F.cross_entropy(heads[0](h), y), F.mse_loss(heads[1](h), aim)
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        scaler.unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(trunk.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


@odd(
    notes="one scaler serves two optimizers: one is unscaled by hand and clipped, the other in step(), and "
    "update() comes once"
)
def one_scaler_for_two_optimizers() -> TrainLoop:
    trunk, heads = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])
    optimizers = [torch.optim.Adam(trunk.parameters(), lr=5e-3), torch.optim.SGD(heads.parameters(), lr=0.1)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = points()
    return TrainLoop(
        model={"trunk": trunk, "heads": heads},
        optimizer=optimizers,
        scaler=scaler,
        batch=(x, y, x[:, :1] - x[:, 1:2]),
        fit=lambda batches: train_two_heads(trunk, heads, optimizers, scaler, batches),
    )


def train_penalised(model, optimizer, scaler, batches, weight=0.05):
    parameters = list(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaled = torch.autograd.grad(scaler.scale(loss), parameters, create_graph=True)
        gradients = [g / scaler.get_scale() for g in scaled]
        loss = loss + weight * sum(g.square().sum() for g in gradients)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@odd(notes="parameters' gradients are taken twice per step, scaled, once to be penalised and once to be used")
def gradient_penalty_with_a_scaler() -> TrainLoop:
    model = mlp(8, 16, 1, activation=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=8)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        batch=curves(),
        batches=fresh(curves),
        fit=lambda batches: train_penalised(model, optimizer, scaler, batches),
    )
