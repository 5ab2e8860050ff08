"""Padded texts, several in one batch, and a small causal model."""

from __future__ import annotations

import torch
from torch import nn

from pytest_trainloop import TrainLoop

VOCAB = 24


def padded_text(lengths, *, seed, width=None):
    """Ids from 2 on, padded with 0 to the longest, and a mask of ones at real ones."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids = torch.randint(2, VOCAB, (len(lengths), width), generator=generator)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def answers():
    """A chosen and a rejected answer to each of four prompts of two tokens, as collators for preferences give them."""
    batch = {}
    for seed, (side, lengths) in enumerate((("chosen", (9, 6, 5, 7)), ("rejected", (5, 9, 6, 4))), start=1):
        ids, mask = padded_text(lengths, seed=seed)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": mask, f"{side}_labels": labels}
    return batch


class CausalModel(nn.Module):
    """One layer of attention; gives scores of the next token."""

    def __init__(self, width=16):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, width), nn.Embedding(32, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, ids, attended):
        length = ids.shape[1]
        x = self.embed(ids) + self.position(torch.arange(length, device=ids.device))
        ahead = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        mixed = self.attention(x, x, x, attn_mask=ahead, key_padding_mask=attended == 0, need_weights=False)[0]
        return self.head(self.norm(x + mixed))


def trained(model, batch, loss_of, **fields):
    """A plain loop over one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(model, item).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **fields)
