"""Sentences that an encoder sorts by length, as packed sequences once had to be, and their pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.loops.nets import contrast
from tests.loops.odd import odd
from tests.loops.pairs import pair
from tests.loops.plain import loop


class Sentences(nn.Module):
    def __init__(self, put_back):
        super().__init__()
        self.words, self.rnn = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
        self.put_back = put_back

    def forward(self, ids, lengths):
        lengths, order = lengths.sort(descending=True)
        _, hidden = self.rnn(pack_padded_sequence(self.words(ids[order]), lengths, batch_first=True))
        return self.put_back(F.normalize(hidden[-1], dim=-1), order)


class Captioned(nn.Module):
    def __init__(self, put_back, after=lambda pictures, lengths: pictures):
        super().__init__()
        self.pictures, self.sentences = nn.Linear(6, 8), Sentences(put_back)
        self.after = after

    def forward(self, pictures, ids, lengths):
        pictures = F.normalize(self.pictures(pictures), dim=-1)
        return self.after(pictures, lengths) @ self.sentences(ids, lengths).T


def captioned(put_back, **fields):
    def make():
        draw = torch.Generator().manual_seed(2)
        lengths, ids = torch.tensor([3, 6, 4, 7, 5, 8, 2, 9]), torch.randint(1, 20, (8, 9), generator=draw)
        ids = ids * (torch.arange(9) < lengths[:, None])
        pictures = torch.randn(20, 6, generator=draw)[ids].mean(1)
        after = fields.pop("after", None)
        model = Captioned(put_back, after) if after else Captioned(put_back)
        return loop(model, (pictures, ids, lengths), lambda m, b: contrast(m(*b)), **fields)

    return make


# https://github.com/fartashf/vsepp/pull/36: sentences come back sorted, pictures stay in the order of the batch.

for declared in ({}, {"rows_interact": True}):
    pair(
        "sentences_come_back_sorted" + "_and_rows_interact" * bool(declared),
        "batch_independence",
        "order_matters",
        change="lengths.sort(descending=True)",
        faulty=captioned(lambda rows, order: rows, **declared),
        fixed=captioned(lambda rows, order: rows[order.argsort()], **declared),
    )


@odd(notes="sentences and pictures are sorted by the same lengths")
def sentences_and_pictures_sorted_together():
    def as_sorted(pictures, lengths):
        return pictures[lengths.argsort(descending=True)]

    return captioned(lambda rows, order: rows, after=as_sorted, rows_interact=True)()


@odd(notes="each picture is compared with the sentence of the next row on purpose")
def negatives_by_a_roll():
    class Rolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(6, 8), nn.Embedding(20, 8)

        def forward(self, pictures, ids):
            left, order = self.left(pictures), torch.arange(len(ids)).roll(1)
            return (left * self.right(ids)).sum(-1), (left * self.right(ids[order.sort().indices.roll(1)])).sum(-1)

    def loss_of(model, batch):
        own, other = model(*batch)
        return F.softplus(other - own).mean()

    draw = torch.Generator().manual_seed(3)
    batch = torch.randn(8, 6, generator=draw), torch.randperm(20, generator=draw)[:8]
    return loop(Rolled(), batch, loss_of, rows_interact=True)
