"""Inputs that the model does not read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop


def sentences(rows=8, length=9, vocab=20):
    ids, _ = data.tokens(rows=rows, length=length, vocab=vocab)
    return {"input_ids": ids, "labels": ids[:, 0] % 3}


# Inputs that are not read.


class Blind(nn.Module):
    def __init__(self, prepare):
        super().__init__()
        self.body, self.prepare = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), prepare

    def forward(self, x):
        return self.body(self.prepare(x))


class Words(nn.Module):
    def __init__(self, scaled):
        super().__init__()
        self.embed, self.head, self.scaled = nn.Embedding(20, 16), nn.Linear(16, 3), scaled

    def forward(self, input_ids):
        ids = (input_ids / 20).long() if self.scaled else input_ids
        return self.head(self.embed(ids).mean(1))


def words(scaled):
    def make():
        return loop(Words(scaled), sentences(), lambda m, b: F.cross_entropy(m(b["input_ids"]), b["labels"]))

    return make


class Masked(nn.Module):
    """The mask is handed over, and forgotten."""

    def __init__(self, uses):
        super().__init__()
        self.embed, self.head, self.uses = nn.Embedding(20, 16), nn.Linear(16, 3), uses

    def forward(self, input_ids, attention_mask):
        hidden, mask = self.embed(input_ids), attention_mask[..., None].to(self.embed.weight.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1) if self.uses else hidden.mean(1))


def masked(uses):
    def make():
        batch = sentences() | {"attention_mask": (torch.arange(9)[None] < torch.arange(2, 10)[:, None]).long()}
        return loop(
            Masked(uses),
            batch,
            lambda m, b: F.cross_entropy(m(b["input_ids"], b["attention_mask"]), b["labels"]),
        )

    return make


pair(
    "zeros_in_place_of_the_input",
    "input_dependence",
    "inputs_ignored",
    culprits=("batch[0]",),
    faulty=lambda: loop(Blind(torch.zeros_like), data.labelled(), cross_entropy),
    fixed=lambda: loop(Blind(lambda x: x), data.labelled(), cross_entropy),
)
pair(
    "ids_that_a_cast_turns_into_zeros",
    "input_dependence",
    "inputs_ignored",
    culprits=("batch['input_ids']",),
    faulty=words(scaled=True),
    fixed=words(scaled=False),
)
pair(
    "a_mask_that_nothing_reads",
    "input_dependence",
    "input_ignored",
    level="advice",
    culprits=("batch['attention_mask']",),
    faulty=masked(uses=False),
    fixed=masked(uses=True),
)
