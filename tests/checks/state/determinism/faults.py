"""Runs that cannot be repeated under one seed."""

from __future__ import annotations

import itertools
import random
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributions import Normal

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def plain(model, optimizer, loss_of):
    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()

    return fit


# Augmentation by a numpy generator that is seeded from the system.


def augmented(generator_of):
    def make():
        generator = generator_of()
        model = mlp(6, 24, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def loss_of(batch):
            x, y = batch
            noise = torch.from_numpy(generator.normal(scale=0.05, size=x.shape)).to(x.dtype)
            return F.cross_entropy(model(x + noise), y)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=plain(model, optimizer, loss_of))

    return make


pair(
    "numpy_generator_without_seed",
    "determinism",
    "unseeded_random",
    faulty=augmented(np.random.default_rng),
    fixed=augmented(lambda: np.random.default_rng(1234)),
)


# Inputs dropped by the system's generator, behind a draw that torch's seed reaches: Normal.rsample draws into memory
# that was not written yet, and what stood there is no difference.


def autoencoder_of_samples(draws):
    def make():
        model = mlp(6, 24, 6)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def loss_of(batch):
            x, _ = batch
            sampled = Normal(model(x), 0.1).rsample()
            kept = torch.tensor([draws() > 0.2 for _ in x])
            return ((sampled - x).square().mean(1) * kept).mean()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=plain(model, optimizer, loss_of))

    return make


pair(
    "rows_dropped_by_the_system_behind_a_sample",
    "determinism",
    "unseeded_random",
    where="kept = torch.tensor([draws()",
    faulty=autoencoder_of_samples(random.SystemRandom().random),
    fixed=autoencoder_of_samples(random.random),
)


# Sums in the order in which parts come in, as atomics on a GPU do, unless deterministic kernels are asked for.

ARRIVALS = itertools.count()


class ScatteredSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        parts = list((x * x).flatten().split(2))
        if not torch.are_deterministic_algorithms_enabled():
            turn = zlib.crc32(str(next(ARRIVALS)).encode()) % len(parts)
            parts = parts[turn:] + parts[:turn]
        total = torch.zeros(())
        for part in parts:
            total = total + part.sum()
        return total

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


def scattered(sum_of):
    def make():
        model = mlp(6, 24, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(rows=26),
            fit=plain(model, optimizer, lambda batch: sum_of(model(batch[0]) - batch[1]) / len(batch[0])),
        )

    return make


pair(
    "sum_in_order_of_arrival",
    "determinism",
    "nondeterministic_kernel",
    level="advice",
    culprits=("loss",),
    faulty=scattered(ScatteredSum.apply),
    fixed=scattered(lambda x: (x * x).sum()),
)


# A generator at module level: every run goes on where the last one stopped.

SHARED = np.random.default_rng(0)


def mixed_up(generator_of):
    def make():
        generator = generator_of()
        model = mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def loss_of(batch):
            x, y = batch
            share = float(generator.beta(0.4, 0.4))
            order = torch.from_numpy(generator.permutation(len(x)))
            logits = model(share * x + (1 - share) * x[order])
            return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=plain(model, optimizer, loss_of))

    return make


pair(
    "generator_at_module_level",
    "determinism",
    "state_outside_loop",
    level="advice",
    faulty=mixed_up(lambda: SHARED),
    fixed=mixed_up(lambda: np.random.default_rng(0)),
)
