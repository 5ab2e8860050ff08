"""Checkpoints whose function changes a state, and finds it changed when it runs again."""

from __future__ import annotations

import torch
from torch import nn

from tests.checks.numerics.checkpointing_equivalence.language_models import (
    CHECK,
    Blocks,
    language,
    saved,
)
from tests.loops import data
from tests.loops.nets import GPT
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop

# A block counts its calls, and cools its attention with them.


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
        return loop(model, data.images(), cross_entropy, optimizer)

    return make


pair(
    "batch_norm_under_a_checkpoint_moves_twice",
    CHECK,
    "statistics_updated_twice",
    level="advice",
    culprits=("norm.running_mean", "norm.num_batches_tracked"),
    faulty=pictures(norm_inside=True),
    fixed=pictures(norm_inside=False),
)


class Switched(Pictures):
    """As the project writes it: a flag switches the checkpoint on."""

    def __init__(self, *, norm_inside, checkpoint):
        super().__init__(norm_inside=norm_inside)
        self.part_of = saved if checkpoint else lambda part, h: part(h)

    def forward(self, x):
        h = self.stem(x)
        return self.head(self.part_of(self.part, h if self.norm_inside else self.norm(h)).flatten(1))


def switched_pictures(**how):
    def make(checkpoint=False):
        model = Switched(checkpoint=checkpoint, **how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return loop(model, data.images(), cross_entropy, optimizer)

    return make


pair(
    "a_knob_that_moves_a_batch_norm_twice",
    CHECK,
    "statistics_updated_twice",
    culprits=("norm.running_mean",),
    faulty=switched_pictures(norm_inside=True),
    fixed=switched_pictures(norm_inside=False),
)
