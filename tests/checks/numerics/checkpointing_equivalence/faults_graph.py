"""Checkpoints that cut the graph, or compute something else in the backward pass."""

from __future__ import annotations

import torch
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.checkpointing_equivalence.language_models import (
    CHECK,
    Blocks,
    language,
    reentrant,
    saved,
    two_ways,
)
from tests.loops import data
from tests.loops.nets import GPT, lm_loss
from tests.loops.pairs import pair
from tests.loops.plain import loop, mse

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
        return loop(model, data.table(), mse, optimizer)

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
