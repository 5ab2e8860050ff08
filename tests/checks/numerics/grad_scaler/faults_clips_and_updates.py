"""Clips of gradients that are still scaled; gradient scalers that are never updated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# Mixed precision with loss scaling.


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def never_updated(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    clip(model)
    scaler.step(optimizer)


def right(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    clip(model)
    scaler.step(optimizer)
    scaler.update()


def train_scaled(model, optimizer, scaler, batches, update):
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        update(model, optimizer, scaler)


def scaled(update, network, batch):
    def make():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=batch(),
            fit=lambda batches: train_scaled(model, optimizer, scaler, batches, update),
        )

    return make


def tabular_net():
    return mlp(6, 32, 3)


pair(
    "mlp_scaler_never_updated",
    "grad_scaler",
    "update_missing",
    raises="unscale_() is being called after step()",
    faulty=scaled(never_updated, tabular_net, data.labelled),
    fixed=scaled(right, tabular_net, data.labelled),
)
