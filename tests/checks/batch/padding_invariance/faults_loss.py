"""Losses in which padded positions count, or are counted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding
from tests.loops.padded_texts import PAD, loop, texts
from tests.loops.pairs import pair


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)).tanh())


def each(model, batch):
    tags = batch["tags"].clamp(min=0)
    return -model(batch["input_ids"]).log_softmax(-1).gather(-1, tags.unsqueeze(-1)).squeeze(-1)


def mean_of_zeros(model, batch):
    losses, mask = each(model, batch), batch["attention_mask"]
    return (losses * mask).mean()


def mean_of_tokens(model, batch):
    losses, mask = each(model, batch), batch["attention_mask"]
    return (losses * mask).sum() / mask.sum()


KEYS = ("input_ids", "attention_mask", "tags")


# Frames: what is predicted for padded ones is pulled to zero.


class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def frames(kept):
    def loss_of(model, batch):
        x, lengths = batch
        mask = (torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]).unsqueeze(-1)
        errors = (model(x) - x.flip(-1)).square() * (mask if kept else 1)
        return errors.sum() / (4 * mask.sum())

    def make():
        batch = texts()
        x = torch.sin(0.7 * torch.arange(10)[None, :, None] + torch.arange(4) + torch.arange(6)[:, None, None])
        x = x * (batch["attention_mask"].unsqueeze(-1))
        made = loop(Frames(), (), loss_of, padding=Padding())
        made.batch = (x, batch["lengths"])
        return made

    return make


# The mean of each text, over all of its positions.


def mean_of_rows(model, batch):
    losses = F.cross_entropy(
        model(batch["input_ids"]).transpose(1, 2), batch["tags"], reduction="none", ignore_index=-100
    )
    return losses.mean(1).mean()


def mean_of_real_rows(model, batch):
    losses = F.cross_entropy(
        model(batch["input_ids"]).transpose(1, 2), batch["tags"], reduction="none", ignore_index=-100
    )
    return (losses.sum(1) / batch["lengths"]).mean()


pair(
    "mean_of_each_text_over_its_padding",
    "padding_invariance",
    "mean_over_padding",
    faulty=lambda: loop(Tagger(), (*KEYS, "lengths"), mean_of_rows, varying=True),
    fixed=lambda: loop(Tagger(), (*KEYS, "lengths"), mean_of_real_rows, varying=True),
)


# Convolutions see the edge of the text, or the padding behind it.


class Convolved(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 5)
        self.first, self.second = (nn.Conv1d(16, 16, 3, padding=1) for _ in range(2))
        self.masked = masked

    def forward(self, ids):
        kept = (ids != PAD).unsqueeze(1).to(self.embed.weight.dtype) if self.masked else 1
        x = self.embed(ids).transpose(1, 2) * kept
        x = self.first(x).relu() * kept
        return self.head(self.second(x).relu().transpose(1, 2))


def convolved(masked):
    return lambda: loop(
        Convolved(masked),
        KEYS,
        lambda model, batch: F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["tags"]),
    )


pair(
    "convolutions_reach_into_the_padding",
    "padding_invariance",
    "padding_counts",
    level="advice",
    culprits=("conv1d",),
    faulty=convolved(masked=False),
    fixed=convolved(masked=True),
)
