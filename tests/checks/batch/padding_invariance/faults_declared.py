"""Padding that is declared, and counts: faults where the same is advice without the declaration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding
from tests.checks.batch.padding_invariance.faults_attention import causal
from tests.checks.batch.padding_invariance.faults_loss import (
    KEYS,
    Tagger,
    convolved,
    frames,
    mean_of_tokens,
    mean_of_zeros,
)
from tests.loops.padded_texts import PAD, class_loss, loop
from tests.loops.pairs import pair

DECLARED = Padding(pad_id=PAD, ignore_index=-100)
SKIP = 'skip={"padding_invariance:'


def declared(make, padding=DECLARED):
    """The same project, with its padding declared."""

    def with_padding():
        made = make()
        made.padding = padding
        return made

    return with_padding


def undeclared(make):
    return declared(make, padding=None)


def tagged(model, loss_of, keys=KEYS, **fields):
    return lambda: loop(model(), keys, loss_of, padding=DECLARED, **fields)


pair(
    "declared_padding_in_the_divisor_of_a_mean",
    "padding_invariance",
    "mean_over_padding",
    where="loss.backward()",
    mentions=("a constant factor", SKIP),
    faulty=tagged(Tagger, mean_of_zeros),
    fixed=tagged(Tagger, mean_of_tokens),
)
pair(
    "undeclared_frames_are_pulled_to_zero",
    "padding_invariance",
    "padded_targets",
    faulty=undeclared(frames(kept=False)),
    fixed=undeclared(frames(kept=True)),
)
pair(
    "convolutions_reach_into_declared_padding",
    "padding_invariance",
    "padding_counts",
    culprits=("conv1d",),
    faulty=declared(convolved(masked=False)),
    fixed=declared(convolved(masked=True)),
)


def from_the_edge(mask):
    return torch.arange(mask.shape[1], device=mask.device)


def from_the_first(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


pair(
    "declared_left_padding_without_position_ids",
    "padding_invariance",
    "positions_shifted",
    culprits=("embedding",),
    mentions=(SKIP,),
    faulty=declared(causal(True, from_the_edge, varying=False)),
    fixed=declared(causal(True, from_the_first, varying=False)),
)


class TextCNN(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.embed, self.conv = nn.Embedding(16, 16, padding_idx=PAD), nn.Conv1d(16, 24, 3, padding=1)
        self.head, self.masked = nn.Linear(24, 3), masked

    def forward(self, ids, mask):
        x = self.conv(self.embed(ids).transpose(1, 2))
        if self.masked:
            x = x.masked_fill(mask[:, None] == 0, float("-inf"))
        return self.head(x.amax(-1).tanh())


pair(
    "maximum_over_declared_padding",
    "padding_invariance",
    "padding_pooled",
    culprits=("amax",),
    mentions=("is common", SKIP),
    faulty=tagged(lambda: TextCNN(masked=False), class_loss, ("input_ids", "attention_mask", "labels")),
    fixed=tagged(lambda: TextCNN(masked=True), class_loss, ("input_ids", "attention_mask", "labels")),
)


# A penalty on the scores, over all positions or the real ones.


def with_penalty(masked):
    def loss_of(model, batch):
        scores = model(batch["input_ids"])
        sizes = scores.logsumexp(-1).square()
        kept = (batch["input_ids"] != PAD).to(sizes.dtype)
        penalty = (sizes * kept).sum() / kept.sum() if masked else sizes.mean()
        return F.cross_entropy(scores.transpose(1, 2), batch["tags"]) + 0.1 * penalty

    return loss_of


pair(
    "penalty_over_declared_padding",
    "padding_invariance",
    "padded_targets",
    where="else sizes.mean()",
    mentions=("it may be a penalty on outputs", SKIP),
    faulty=tagged(Tagger, with_penalty(masked=False)),
    fixed=tagged(Tagger, with_penalty(masked=True)),
)


# Padded on the left, a padded query looks at all alike, and is asked for the first token.


class Added(nn.Module):
    """A causal model that adds the smallest number where nothing is to be seen."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(16, 16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, ids, mask):
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        seen = mask[:, None].bool() & torch.ones_like(scores[:1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
        return self.head(x + weights @ v)


def first_token(asked):
    def loss_of(model, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        real = mask[:, 1:].bool() if asked else (mask[:, 1:] * mask[:, :-1]).bool()
        return F.cross_entropy(model(ids, mask)[:, :-1].transpose(1, 2), ids[:, 1:].masked_fill(~real, -100))

    return tagged(Added, loss_of, ("input_ids", "attention_mask"), left=True)


pair(
    "first_token_asked_of_declared_padding",
    "padding_invariance",
    "padded_targets",
    mentions=("first token", SKIP),
    faulty=first_token(asked=True),
    fixed=first_token(asked=False),
)
