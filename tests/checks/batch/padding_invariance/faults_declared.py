"""Padding that is declared, and counts: faults where the same is advice without the declaration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pytest_trainloop.loop import Padding
from tests.checks.batch.padding_invariance.faults_attention import causal
from tests.checks.batch.padding_invariance.faults_loss import (
    KEYS,
    Tagger,
    convolved,
    each,
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


def tag_loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["tags"])


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
    mentions=("not determined; ruled out",),
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


class Recurrent(nn.Module):
    """Tags by a recurrent net in both directions."""

    def __init__(self, packed):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 5)
        self.net, self.packed = nn.LSTM(16, 8, batch_first=True, bidirectional=True), packed

    def forward(self, ids):
        x = self.embed(ids)
        if not self.packed:
            return self.head(self.net(x)[0])
        lengths = (ids != PAD).sum(1).cpu()
        out, _ = self.net(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head(pad_packed_sequence(out, batch_first=True, total_length=ids.shape[1])[0])


pair(
    "backwards_through_declared_padding",
    "padding_invariance",
    "padding_counts",
    culprits=("lstm",),
    mentions=("pack_padded_sequence",),
    where="return self.head(self.net(x)[0])",
    faulty=tagged(lambda: Recurrent(packed=False), tag_loss),
    fixed=tagged(lambda: Recurrent(packed=True), tag_loss),
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


class Normed(nn.Module):
    """A batch norm over rows and positions, or over the real ones of them."""

    def __init__(self, real):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        self.real = real

    def forward(self, ids):
        x = self.embed(ids)
        if not self.real:
            return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2).tanh())
        kept = ids != PAD
        out = torch.zeros_like(x)
        out[kept] = self.norm(x[kept])
        return self.head(out.tanh())


pair(
    "batch_statistics_over_declared_padding",
    "padding_invariance",
    "padding_counts",
    culprits=("batch_norm",),
    mentions=("with its running statistics both gradients are equal",),
    where="return self.head(self.norm(x.transpose(1, 2))",
    faulty=tagged(lambda: Normed(real=False), tag_loss),
    fixed=tagged(lambda: Normed(real=True), tag_loss),
)


class Gated(nn.Module):
    """A mean over time opens a gate at every position."""

    def __init__(self, masked):
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.masked = masked

    def forward(self, ids):
        x = self.embed(ids)
        kept = (ids != PAD).unsqueeze(-1).to(x.dtype)
        mean = (x * kept).sum(1) / kept.sum(1) if self.masked else x.mean(1)
        return self.head(x * self.gate(mean)[:, None].sigmoid())


pair(
    "gate_by_a_mean_over_declared_padding",
    "padding_invariance",
    "padding_pooled",
    culprits=("mean",),
    mentions=("goes back to every position",),
    faulty=tagged(lambda: Gated(masked=False), tag_loss),
    fixed=tagged(lambda: Gated(masked=True), tag_loss),
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
    "padding_counts",
    mentions=("not determined; ruled out",),
    faulty=tagged(Tagger, with_penalty(masked=False)),
    fixed=tagged(Tagger, with_penalty(masked=True)),
)


# The temperature of attention follows the length: that of the longest text, or the text's own.


class Sharpened(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.embed, self.qk, self.head = nn.Embedding(16, 16), nn.Linear(16, 32), nn.Linear(16, 5)
        self.own = own

    def forward(self, ids):
        x, kept = self.embed(ids), ids != PAD
        q, k = self.qk(x).chunk(2, -1)
        lengths = kept.sum(1) if self.own else torch.full((len(ids),), ids.shape[1], device=ids.device)
        scores = q @ k.transpose(1, 2) * lengths.to(x.dtype).log()[:, None, None] / 4
        weights = scores.masked_fill(~kept[:, None], float("-inf")).softmax(-1)
        return self.head(x + weights @ x)


pair(
    "temperature_by_the_longest_text",
    "padding_invariance",
    "padding_counts",
    faulty=tagged(lambda: Sharpened(own=False), tag_loss),
    fixed=tagged(lambda: Sharpened(own=True), tag_loss),
)


# Alignment: the loss is told that all frames are real.


class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.net(x)[0]).log_softmax(-1)


def aligned(own):
    def loss_of(model, batch):
        scores = model(batch["frames"]).transpose(0, 1)
        lengths = batch["lengths"] if own else torch.full_like(batch["lengths"], len(scores))
        return F.ctc_loss(scores, batch["words"], lengths, batch["word_lengths"])

    def make():
        made = loop(Frames(), ("lengths",), loss_of, padding=Padding())
        lengths = made.batch["lengths"]
        kept = (torch.arange(10)[None] < lengths[:, None]).unsqueeze(-1)
        x = torch.sin(0.7 * torch.arange(10)[None, :, None] + torch.arange(4) + torch.arange(6)[:, None, None])
        words = torch.tensor([[1, 2], [2, 3], [3, 4], [4, 1], [1, 3], [2, 4]])
        made.batch = {"frames": x * kept, "lengths": lengths, "words": words, "word_lengths": torch.full((6,), 2)}
        return made

    return make


pair(
    "alignment_over_declared_padding",
    "padding_invariance",
    "padded_targets",
    mentions=("is told their number as the length",),
    faulty=aligned(own=False),
    fixed=aligned(own=True),
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


def losses_times_mask(model, batch):
    """Summed over real positions, divided by all: the mask is only half used."""
    return (each(model, batch) * batch["attention_mask"]).sum() / batch["attention_mask"].numel()


pair(
    "declared_padding_in_the_number_of_elements",
    "padding_invariance",
    "mean_over_padding",
    faulty=tagged(Tagger, losses_times_mask),
    fixed=tagged(Tagger, mean_of_tokens),
)
