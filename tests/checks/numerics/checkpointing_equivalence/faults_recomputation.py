"""Checkpoints that run something else in the backward pass than ran before: other draws, another state."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, Block, lm_loss
from tests.loops.pairs import pair

CHECK = "checkpointing_equivalence"
reentrant = functools.partial(checkpoint, use_reentrant=True)
saved = functools.partial(checkpoint, use_reentrant=False)


def train(model, optimizer, batches):
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        lm_loss(model, batch).backward()
        optimizer.step()


def language(build, **how):
    def make():
        model = build(**how)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


# Dropout under a checkpoint that was told not to preserve the generator's state, to save a copy to the host.


class Blocks(GPT):
    def __init__(self, run, **how):
        super().__init__(depth=2)
        self.run, self.how = run, how

    def one(self, block, x):
        return block(x)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = self.run(functools.partial(self.one, block), x, **self.how)
        return self.head(self.norm(x))


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
    "layers_dropped_under_a_reentrant_checkpoint",
    CHECK,
    "rng_not_preserved",
    culprits=("python's random",),
    where="self.run(",
    faulty=language(Dropped, run=reentrant),
    fixed=language(DroppedBefore, run=reentrant),
)
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


# One block for all depths, over frozen embeddings: its first use gives it no gradient, the later ones do.


class Universal(GPT):
    def __init__(self, run):
        super().__init__(depth=1)
        self.run = run
        self.time = nn.Parameter(0.1 * torch.randn(3, 24))
        self.token.requires_grad_(False)
        self.position.requires_grad_(False)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for step in range(3):
            x = self.run(self.blocks[0], x) + self.time[step]
        return self.head(self.norm(x))


pair(
    "shared_block_cut_off_once",
    CHECK,
    "inputs_need_grad",
    culprits=("blocks.0.qkv.weight", "blocks.0.mlp.0.weight"),
    mentions=("a part of its gradient only",),
    where="x = self.run(self.blocks[0], x) + self.time[step]",
    faulty=language(Universal, run=reentrant),
    fixed=language(Universal, run=saved),
)


# Two views of a batch go through one tower; only one of them is checkpointed, and its input is data.


class Tower(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 8))

    def forward(self, x):
        h, other = self.run(self.body, x), self.body(x.flip(1))
        return (h - other).square().mean(1, keepdim=True)


def towers(run):
    def make():
        model = Tower(run)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "one_view_behind_a_reentrant_checkpoint",
    CHECK,
    "inputs_need_grad",
    culprits=("body.0.weight", "body.2.bias"),
    where="self.run(self.body, x)",
    faulty=towers(reentrant),
    fixed=towers(saved),
)


# Experts are balanced by a loss that the layer keeps for later: a re-entrant checkpoint makes it without a history.


class Experts(nn.Module):
    def __init__(self, width, count=3):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.balance = None

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        self.balance = shares.mean((0, 1)).square().sum()
        return x + sum(shares[..., i : i + 1] * expert(x).tanh() for i, expert in enumerate(self.experts))


class Mixture(GPT):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList([Experts(24), Experts(24)])

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


def mixture(run):
    def make():
        model = Mixture(run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def fit(batches):
            for batch in batches:
                loss = lm_loss(model, batch) + 0.5 * sum(block.balance for block in model.blocks)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(), fit=fit)

    return make


pair(
    "balancing_loss_kept_under_a_reentrant_checkpoint",
    CHECK,
    "side_result_cut",
    culprits=("blocks.0.router.weight", "blocks.1.router.weight"),
    where="x = self.run(block, x)",
    faulty=mixture(reentrant),
    fixed=mixture(saved),
)


# A block counts its calls, and cools its attention with them.


class Cooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(24, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.block(x * (1.0 + 1.0 / self.calls))


class Cooled(GPT):
    def __init__(self, *, counted_inside):
        super().__init__()
        self.counted_inside, self.steps = counted_inside, 0
        if counted_inside:
            self.blocks = nn.ModuleList([Cooling()])

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        self.steps += 1
        x = saved(self.blocks[0], x if self.counted_inside else x * (1.0 + 1.0 / self.steps))
        return self.head(self.norm(x))


pair(
    "calls_counted_under_a_checkpoint",
    CHECK,
    "state_changed",
    where="return self.block(x * (1.0 + 1.0 / self.calls))",
    faulty=language(Cooled, counted_inside=True),
    fixed=language(Cooled, counted_inside=False),
)


# The same count, used last, under a re-entrant checkpoint.


class CooledLast(Blocks):
    def __init__(self, *, counted_inside, run):
        super().__init__(run)
        self.counted_inside, self.calls = counted_inside, 0

    def one(self, block, x):
        if self.counted_inside:
            self.calls += 1
        return block(x) * (1.0 + 1.0 / (1 + self.calls))


pair(
    "calls_counted_under_a_reentrant_checkpoint",
    CHECK,
    "state_changed",
    where="return block(x) * (1.0 + 1.0 / (1 + self.calls))",
    faulty=language(CooledLast, counted_inside=True, run=reentrant),
    fixed=language(CooledLast, counted_inside=False, run=reentrant),
)


# Keys of the last call are kept and attended to: when the block runs again it finds its own.


class Remembering(GPT):
    def __init__(self, *, writes_inside, run):
        super().__init__()
        self.writes_inside, self.run, self.last = writes_inside, run, None

    def part(self, x, last):
        if self.writes_inside:
            last, self.last = self.last, x.detach()
        return self.blocks[0](x if last is None or last.shape != x.shape else x + 0.3 * last)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        last = self.last
        x = self.run(self.part, x, None if self.writes_inside else last)
        if not self.writes_inside:
            self.last = x.detach()
        return self.head(self.norm(x))


pair(
    "memory_written_under_a_reentrant_checkpoint",
    CHECK,
    "state_changed",
    faulty=language(Remembering, writes_inside=True, run=reentrant),
    fixed=language(Remembering, writes_inside=False, run=reentrant),
)
# A memory of earlier batches grows under a checkpoint: when it runs again, there is more to look back at.


class Growing(GPT):
    def __init__(self, *, writes_inside):
        super().__init__()
        self.writes_inside, self.memory = writes_inside, torch.zeros(1, 24)

    def part(self, x, memory):
        if self.writes_inside:
            memory = self.memory
            self.memory = torch.cat([memory, x.detach().mean(1)])[-64:]
        x = self.blocks[0](x)
        return x + (x @ memory.T / 5.0).softmax(-1) @ memory

    def forward(self, ids):
        start = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        x = saved(self.part, start, self.memory)
        if not self.writes_inside:
            self.memory = torch.cat([self.memory, start.detach().mean(1)])[-64:]
        return self.head(self.norm(x))


pair(
    "memory_grows_under_a_checkpoint",
    CHECK,
    "state_changed",
    raises="have different metadata",
    faulty=language(Growing, writes_inside=True),
    fixed=language(Growing, writes_inside=False),
)


# An input is centred in place, through .data: the second time it is handed what the first has left.


class Centred(Blocks):
    def __init__(self, *, in_place, **how):
        super().__init__(**how)
        self.in_place = in_place

    def one(self, block, x):
        if self.in_place:
            x.data.mul_(0.5)
            return block(x)
        return block(0.5 * x)


pair(
    "input_changed_under_a_checkpoint",
    CHECK,
    "state_changed",
    faulty=language(Centred, in_place=True, run=saved),
    fixed=language(Centred, in_place=False, run=saved),
)


# The checkpointed way through the model was written twice, and is not the same: it leaves the last block out.


class TwoWays(GPT):
    def __init__(self, *, checkpoint, last):
        super().__init__(depth=2)
        self.checkpoint, self.last = checkpoint, last

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        if self.checkpoint:
            for block in self.blocks[: self.last]:
                x = saved(block, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


def two_ways(build, **how):
    def make(checkpoint=False):
        model = build(checkpoint=checkpoint, **how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


pair(
    "checkpointed_way_leaves_a_block_out",
    CHECK,
    "other_computation",
    culprits=("blocks.1.qkv.weight",),
    faulty=two_ways(TwoWays, last=1),
    fixed=two_ways(TwoWays, last=2),
)


# A block takes a shortcut where gradients are off, meant for generation: a re-entrant checkpoint's forward pass has
# them off as well.


class Shortcut(Blocks):
    def one(self, block, x):
        return x + block.mlp(block.norm2(x)) if self.skips() else block(x)

    def skips(self):
        return not torch.is_grad_enabled()


class ShortcutInEval(Shortcut):
    def skips(self):
        return not self.training


pair(
    "shortcut_without_gradients_under_a_checkpoint",
    CHECK,
    "other_computation",
    where="x = self.run(functools.partial(self.one, block), x, **self.how)",
    faulty=language(Shortcut, run=reentrant),
    fixed=language(ShortcutInEval, run=reentrant),
    quick=True,
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


# The running statistics of a batch norm under a checkpoint move twice a step.


class Pictures(nn.Module):
    def __init__(self, *, norm_inside):
        super().__init__()
        self.norm_inside = norm_inside
        self.stem, self.norm, self.body = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(128, 4)

    def part(self, h):
        return self.body((self.norm(h) if self.norm_inside else h).relu())

    def forward(self, x):
        h = self.stem(x)
        return self.head(saved(self.part, h if self.norm_inside else self.norm(h)).flatten(1))


def pictures(**how):
    def make():
        model = Pictures(**how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=fit)

    return make


pair(
    "batch_norm_under_a_checkpoint_moves_twice",
    CHECK,
    "statistics_updated_twice",
    level="advice",
    culprits=("norm.running_mean", "norm.num_batches_tracked"),
    mentions=("2 with checkpointing and 1 without",),
    faulty=pictures(norm_inside=True),
    fixed=pictures(norm_inside=False),
)
