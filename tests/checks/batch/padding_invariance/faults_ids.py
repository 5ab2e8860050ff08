"""Rows that are filled with another id than the one that the model takes for padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.pairs import pair
from tests.loops.several_texts import trained

LENGTHS, PAD = (9, 6, 4, 7), 1


def filled(value):
    """Ids from 2 on, (rows, positions), with this one beyond each row's length."""
    ids = torch.randint(2, 12, (len(LENGTHS), 9), generator=torch.Generator().manual_seed(6))
    beyond = torch.arange(9)[None] >= torch.tensor(LENGTHS)[:, None]
    return ids.masked_fill(beyond, value)


class Classifier(nn.Module):
    """Pools over what is not its padding id; over ``lengths`` where they are given."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8, padding_idx=PAD), nn.Linear(8, 3)

    def forward(self, ids, lengths=None):
        kept = ids.ne(PAD) if lengths is None else torch.arange(ids.shape[1])[None] < lengths[:, None]
        hidden = self.embed(ids).tanh() * kept.unsqueeze(-1)
        return self.head(hidden.sum(1) / kept.sum(1, keepdim=True))


def texts(value, by_lengths=False):
    def loss_of(model, batch):
        lengths = batch["length"] if by_lengths else None
        return F.cross_entropy(model(batch["ids"], lengths), batch["labels"])

    def make() -> TrainLoop:
        batch = {"ids": filled(value), "length": torch.tensor(LENGTHS), "labels": torch.tensor([0, 1, 2, 1])}
        return trained(Classifier(), batch, loss_of)

    return make


pair(
    "rows_are_filled_with_another_id_than_the_models",
    "padding_invariance",
    "other_pad_id",
    quick=True,
    faulty=texts(0),
    fixed=texts(PAD),
)
