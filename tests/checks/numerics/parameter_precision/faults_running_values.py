"""Running averages that are held outside of modules' parameters, in a precision that takes no small updates."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


def mlp():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


# Shadow weights in a dict, made in the dtype that the forward pass computes in.


class Shadow:
    def __init__(self, model, decay, dtype):
        self.decay = decay
        self.shadow = {name: p.detach().clone().to(dtype) for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            old = self.shadow[name]
            self.shadow[name] = self.decay * old + (1.0 - self.decay) * p.to(old.dtype)


def with_shadow(dtype):
    def make():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ema = Shadow(model, 0.9999, dtype)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                ema.update(model)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "shadow_weights_in_bfloat16",
    "parameter_precision",
    "average_lost",
    culprits=("ema.shadow['0.weight']",),
    where="self.shadow[name] = self.decay * old",
    faulty=with_shadow(torch.bfloat16),
    fixed=with_shadow(torch.float32),
)


# Statistics of the inputs in a buffer that was cast with the model.


class Standardise(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.register_buffer("spread", torch.ones(width, dtype=dtype))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.spread.lerp_(x.var(0).to(self.spread.dtype), 1e-4)
        return x / self.spread.to(x.dtype).sqrt()


def standardised(dtype):
    def make():
        model = nn.Sequential(Standardise(6, dtype), mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "statistics_of_inputs_in_bfloat16",
    "parameter_precision",
    "average_lost",
    culprits=("model.0.spread",),
    where="self.spread.lerp_(",
    faulty=standardised(torch.bfloat16),
    fixed=standardised(torch.float32),
)


# An averaged copy of the model, which only the trainer holds.


def with_copy(dtype):
    def make():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        averaged = copy.deepcopy(model).to(dtype).requires_grad_(False)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for a, p in zip(averaged.parameters(), model.parameters(), strict=True):
                        a.mul_(0.9999).add_(p.to(a.dtype), alpha=1e-4)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "averaged_copy_in_bfloat16",
    "parameter_precision",
    "average_lost",
    where="a.mul_(0.9999)",
    faulty=with_copy(torch.bfloat16),
    fixed=with_copy(torch.float32),
)
