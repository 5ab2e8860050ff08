"""Positions whose angles are lost in low precision."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.precision_parity.faults_autocast import autocast, draws
from tests.loops.pairs import pair

# Rotary angles: a product of positions and frequencies, which autocast makes in bfloat16.


class RotaryTable(nn.Module):
    def __init__(self, width, *, in_float32):
        super().__init__()
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, width, 2) / width), persistent=False)
        self.in_float32 = in_float32

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device).float()
        with torch.autocast("cpu", enabled=False) if self.in_float32 else contextlib.nullcontext():
            angles = positions[:, None] @ self.frequencies[None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RotaryTagger(nn.Module):
    def __init__(self, *, in_float32):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.rotary = RotaryTable(16, in_float32=in_float32)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens):
        h = self.embed(tokens)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        cos, sin = self.rotary(q)
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
        return self.head(h + mixed)


def rotary(*, in_float32):
    def make(precision="bf16"):
        model = RotaryTagger(in_float32=in_float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(20, (2, 320), generator=draws(1))

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    loss = F.cross_entropy(model(x).flatten(0, 1), (x % 5).flatten())
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=tokens, fit=fit)

    return make


pair(
    "rotary_angles_under_autocast",
    "precision_parity",
    "angles_lost",
    faulty=rotary(in_float32=False),
    fixed=rotary(in_float32=True),
    culprits=("rotary",),
    where="angles.cos()",
    quick=True,
)
