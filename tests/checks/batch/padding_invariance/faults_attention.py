"""Attention over padded keys: masks that are forgotten, not handed on, or the wrong way round."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.padded_texts import Encoder, class_loss, loop
from tests.loops.pairs import pair

MASKED = ("input_ids", "attention_mask", "labels")


def encoder(mask_of):
    return lambda: loop(Encoder(mask_of), MASKED, class_loss)


pair(
    "key_padding_mask_inverted",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("multi_head_attention_forward",),
    faulty=encoder(lambda mask: mask == 1),
    fixed=encoder(lambda mask: mask == 0),
)


# The mask is added to the scores, and it is zero where it should be large.


class Additive(Encoder):
    def __init__(self, masked):
        super().__init__(None)
        self.qkv = nn.Linear(16, 48)
        self.attention = nn.Linear(16, 16)
        self.masked = masked

    def forward(self, ids, mask):
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        scores = scores.masked_fill(self.masked(mask)[:, None, :], -1e9)
        x = self.norm(x + self.attention(scores.softmax(-1) @ v))
        kept = mask.unsqueeze(-1).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))


def additive(masked):
    return lambda: loop(Additive(masked), MASKED, class_loss)


pair(
    "additive_mask_inverted",
    "padding_invariance",
    "padded_keys_attended",
    culprits=("softmax",),
    where="scores.softmax(-1)",
    faulty=additive(lambda mask: mask == 1),
    fixed=additive(lambda mask: mask == 0),
)


# Left padding: a causal mask alone lets every token look at the padding before it.


class Causal(nn.Module):
    """A causal model; ``positions`` says where its positions are counted from."""

    def __init__(self, masked, positions):
        super().__init__()
        self.token, self.position = nn.Embedding(16, 16), nn.Embedding(12, 16)
        self.qkv, self.proj, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.masked, self.positions = masked, positions

    def forward(self, ids, mask):
        length = ids.shape[1]
        x = self.token(ids) + self.position(self.positions(mask))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
        if self.masked:
            itself = torch.eye(length, dtype=torch.bool, device=ids.device)
            seen = seen & (mask[:, None, None, :].bool() | itself)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.head(x + self.proj(mixed.transpose(1, 2).flatten(2)))


def from_the_edge(mask):
    return torch.arange(mask.shape[1], device=mask.device)


def from_the_first(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def next_token(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids[:, 1:].masked_fill((mask[:, 1:] == 0) | (mask[:, :-1] == 0), -100)
    return F.cross_entropy(model(ids, mask)[:, :-1].transpose(1, 2), labels)


def causal(masked, positions, *, varying=True):
    return lambda: loop(
        Causal(masked, positions), ("input_ids", "attention_mask"), next_token, varying=varying, left=True
    )


pair(
    "left_padding_without_mask_and_positions",
    "padding_invariance",
    "padded_keys_attended",
    faulty=causal(False, from_the_edge),
    fixed=causal(True, from_the_first),
)
pair(
    "left_padding_without_position_ids",
    "padding_invariance",
    "positions_shifted",
    culprits=("embedding",),
    where="x = self.token(ids) + self.position(",
    faulty=causal(True, from_the_edge),
    fixed=causal(True, from_the_first),
)
