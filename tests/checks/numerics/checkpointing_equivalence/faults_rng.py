"""Checkpoints that draw other random numbers in the backward pass than before."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.checks.numerics.checkpointing_equivalence.language_models import (
    CHECK,
    Blocks,
    language,
    reentrant,
    saved,
    two_ways,
)
from tests.loops.nets import GPT
from tests.loops.pairs import pair

# Dropout under a checkpoint that was told not to preserve the generator's state, to save a copy to the host.


class WithDropout(Blocks):
    def one(self, block, x):
        return block(F.dropout(x, 0.1, self.training))


for name, run in (("", saved), ("reentrant_", reentrant)):
    pair(
        f"{name}checkpoint_without_rng_state",
        CHECK,
        "rng_not_preserved",
        culprits=("torch's generator",),
        mentions=("torch's generator",),
        where="x = self.run(functools.partial(self.one, block), x, **self.how)",
        faulty=language(WithDropout, run=run, preserve_rng_state=False),
        fixed=language(WithDropout, run=run),
    )


# Stochastic depth by python's generator, inside of the checkpoint.


class Dropped(Blocks):
    def one(self, block, x):
        return x if self.training and random.random() < 0.4 else block(x)


class DroppedBefore(Blocks):
    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            if not self.training or random.random() >= 0.4:
                x = self.run(block, x)
        return self.head(self.norm(x))


pair(
    "layers_dropped_under_a_checkpoint",
    CHECK,
    "rng_not_preserved",
    culprits=("python's random",),
    raises="different number of tensors",
    faulty=language(Dropped, run=saved),
    fixed=language(DroppedBefore, run=saved),
)


# Noise from numpy, and from a generator of the project's own.


class NumpyNoise(Blocks):
    def one(self, block, x):
        noise = np.random.standard_normal(tuple(x.shape))
        return block(x * (1 + 0.2 * torch.as_tensor(noise, dtype=x.dtype)))


class OwnNoise(Blocks):
    def __init__(self, run, **how):
        super().__init__(run, **how)
        self.draws = torch.Generator().manual_seed(1)

    def one(self, block, x):
        return block(x * (1 + 0.2 * torch.randn(x.shape, generator=self.draws)))


class OwnNumpyNoise(Blocks):
    def __init__(self, run, **how):
        super().__init__(run, **how)
        self.draws = np.random.default_rng(1)

    def one(self, block, x):
        return block(x * (1 + 0.2 * torch.as_tensor(self.draws.standard_normal(tuple(x.shape)), dtype=x.dtype)))


class TorchNoise(Blocks):
    def one(self, block, x):
        return block(x * (1 + 0.2 * torch.randn_like(x)))


for name, culprit, build in (
    ("numpy_noise", "numpy's np.random", NumpyNoise),
    ("own_generator", "a torch.Generator of its own", OwnNoise),
    ("own_numpy_generator", "a numpy generator of its own", OwnNumpyNoise),
):
    pair(
        f"{name}_under_a_checkpoint",
        CHECK,
        "rng_not_preserved",
        culprits=(culprit,),
        faulty=language(build, run=saved),
        fixed=language(TorchNoise, run=saved),
    )


# A recomputation of the project's own forgets the generator.


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, preserve, *weights):
        ctx.block, ctx.state = block, torch.get_rng_state() if preserve else None
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, incoming):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        if ctx.state is not None:
            torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            out = ctx.block(x)
        torch.set_rng_state(now)
        of_input, *others = torch.autograd.grad(out, (x, *ctx.block.parameters()), incoming)
        return of_input, None, None, *others


class OwnCheckpoint(GPT):
    def __init__(self, *, checkpoint, preserve):
        super().__init__()
        self.checkpoint, self.preserve = checkpoint, preserve
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 24))])

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = x + (Again.apply(x, block, self.preserve, *block.parameters()) if self.checkpoint else block(x))
        return self.head(self.norm(x))


pair(
    "own_recomputation_forgets_the_generator",
    CHECK,
    "rng_not_preserved",
    culprits=("torch's generator",),
    faulty=two_ways(OwnCheckpoint, preserve=False),
    fixed=two_ways(OwnCheckpoint, preserve=True),
    quick=True,
)
