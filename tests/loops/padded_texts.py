"""Rows of unequal lengths, padded on the right or on the left, and small models that read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data

PAD = 0


def texts(rows=6, length=10, left=False, seed=0):
    """Ids from 1 to 15 that count upwards, a class for each row and a tag for each token."""
    ids, _ = data.tokens(rows=rows, length=length, vocab=15, seed=seed)
    ids = ids + 1
    lengths = torch.tensor([length - 2 * (n % 4) for n in range(rows)])
    place = torch.arange(length)[None]
    mask = (place >= length - lengths[:, None]) if left else (place < lengths[:, None])
    ids = (ids.gather(1, (place - (length - lengths[:, None])).clamp(min=0)) if left else ids) * mask
    tags = torch.where(mask, ids % 5, -100)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.max(1).values % 3,
        "lengths": lengths,
        "tags": tags,
    }


def of_lengths(count, **kwargs):
    """Batches padded to the longest of each."""
    return [texts(length=10 - 2 * (n % 2), seed=n, **kwargs) for n in range(count)]


def loop(model, keys, loss_of, *, varying=False, left=False, **fields):
    """A plain loop over a batch that holds these keys."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()

    def only(batch):
        return {key: batch[key] for key in keys}

    batches = (lambda n: [only(b) for b in of_lengths(n, left=left)]) if varying else None
    return TrainLoop(model=model, optimizer=optimizer, batch=only(texts(left=left)), batches=batches, fit=fit, **fields)


def class_loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])


class Encoder(nn.Module):
    """A hand-written layer of multi-head attention; ``mask_of`` makes its key_padding_mask of the batch's mask."""

    def __init__(self, mask_of, width=16, classes=3):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.mask_of = mask_of

    def forward(self, ids, mask):
        x = self.embed(ids)
        x = self.norm(x + self.attention(x, x, x, key_padding_mask=self.mask_of(mask), need_weights=False)[0])
        kept = mask.unsqueeze(-1).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))
