"""Steps and losses that go past the gradient scaler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.grad_scaler.faults_clips_and_updates import scaled, tabular_net
from tests.loops import data
from tests.loops.pairs import pair

# The plain step left in, or a loss that was left out when the loop was ported.


def train_ported(model, optimizer, scaler, batches, plain):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if plain:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def ported(plain, optimizer_class, network, batch):
    def make():
        model = network()
        optimizer = optimizer_class(model.parameters(), lr=2e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=batch(),
            fit=lambda batches: train_ported(model, optimizer, scaler, batches, plain),
        )

    return make


pair(
    "adam_stepped_past_the_scaler",
    "grad_scaler",
    "not_unscaled",
    where="optimizer.step()",
    faulty=ported(True, torch.optim.Adam, tabular_net, data.labelled),
    fixed=ported(False, torch.optim.Adam, tabular_net, data.labelled),
)


def train_auxiliary(model, optimizer, scaler, batches, scale_both):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = torch.tanh(model[0](x))
            loss = F.cross_entropy(model[1](hidden), y)
            auxiliary = F.mse_loss(model[2](hidden), x)
        scaler.scale(loss).backward(retain_graph=True)
        if scale_both:
            scaler.scale(auxiliary).backward()
        else:
            auxiliary.backward()
        scaler.step(optimizer)
        scaler.update()


def auxiliary(scale_both):
    def make():
        model = nn.ModuleList([nn.Linear(6, 24), nn.Linear(24, 3), nn.Linear(24, 6)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=data.labelled(),
            fit=lambda batches: train_auxiliary(model, optimizer, scaler, batches, scale_both),
        )

    return make


pair(
    "auxiliary_loss_never_scaled",
    "grad_scaler",
    "not_scaled",
    where="auxiliary.backward()",
    faulty=auxiliary(scale_both=False),
    fixed=auxiliary(scale_both=True),
)


def train_with_penalty(model, optimizer, scaler, batches, weight, inside):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        penalty = weight * sum(p.square().sum() for p in model.parameters())
        total = scaler.scale(loss + penalty) if inside else scaler.scale(loss) + penalty
        total.backward()
        scaler.step(optimizer)
        scaler.update()


def penalised(inside):
    def make():
        model = tabular_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=data.labelled(),
            fit=lambda batches: train_with_penalty(model, optimizer, scaler, batches, 1e-2, inside),
        )

    return make


pair(
    "penalty_outside_the_scale",
    "grad_scaler",
    "not_scaled",
    where="total.backward()",
    faulty=penalised(inside=False),
    fixed=penalised(inside=True),
)


# A clip of one's own.


def held_to_length(model, optimizer, scaler):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
    scaler.step(optimizer)
    scaler.update()


def unscaled_then_held_to_length(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    held_to_length(model, optimizer, scaler)


pair(
    "clipped_by_hand_before_unscaling",
    "grad_scaler",
    "clip_before_unscale",
    where="p.grad.mul_(",
    faulty=scaled(held_to_length, tabular_net, data.labelled),
    fixed=scaled(unscaled_then_held_to_length, tabular_net, data.labelled),
)
