"""The language model under checkpoints that most faults of this folder are made of."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, lm_loss

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
