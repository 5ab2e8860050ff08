"""Weights and averages in bfloat16 or float16: small updates are rounded away, entry by entry."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, mlp
from tests.loops.pairs import pair

# Plain SGD on bfloat16 weights: nearly all that it does is below their spacing.


def regression(dtype):
    def make():
        model = mlp(6, 48, 48, 1).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.float32):
                    prediction = model(x.to(dtype))
                F.smooth_l1_loss(prediction.float(), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "sgd_on_bfloat16_weights",
    "parameter_precision",
    "updates_lost",
    culprits=("0.weight", "2.weight"),
    where="optimizer.step()",
    faulty=regression(torch.bfloat16),
    fixed=regression(torch.float32),
)


# An autoencoder in bfloat16 at a usual rate: a part of the updates is lost, and it learns all the same.


def reconstruction(dtype):
    def make():
        model = AutoEncoder().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))

        def fit(batches):
            for x, _ in batches:
                loss = F.mse_loss(model(x.to(dtype)).float(), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "a_part_of_the_updates_in_bfloat16",
    "parameter_precision",
    "updates_lost_in_part",
    level="advice",
    faulty=reconstruction(torch.bfloat16),
    fixed=reconstruction(torch.float32),
)


# torch's own AveragedModel over a bfloat16 network, whose masters are in float32.


def averaged(dtype):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
        low = copy.deepcopy(model).to(dtype)
        average = AveragedModel(low, multi_avg_fn=get_ema_multi_avg_fn(0.9995))
        average.update_parameters(low)  # the first call copies
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for p, master in zip(low.parameters(), model.parameters(), strict=True):
                        p.copy_(master)
                average.update_parameters(low)

        return TrainLoop(
            model={"model": model, "average": average.module}, optimizer=optimizer, batch=data.table(), fit=fit
        )

    return make


pair(
    "averaged_model_in_bfloat16",
    "parameter_precision",
    "average_lost",
    culprits=("average.0.weight", "average.2.weight"),
    faulty=averaged(torch.bfloat16),
    fixed=averaged(torch.float32),
)
