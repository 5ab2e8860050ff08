"""Right loops in which the id of the padding is not that of the model's table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from pytest_trainloop import TrainLoop
from tests.checks.batch.padding_invariance.faults_ids import texts
from tests.loops.odd import odd
from tests.loops.several_texts import trained


@odd(notes="rows are filled with 0 where the table's padding_idx is 1, and padding is known by lengths")
def filled_with_another_id_beside_lengths() -> TrainLoop:
    return texts(0, by_lengths=True)()


@odd(notes="the model compares ids with the end of a text, of which each row has some at its end on purpose")
def texts_that_end_in_several_stops():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8), nn.Linear(9, 3)

        def forward(self, ids):
            stops = (ids == 1).sum(1, keepdim=True) / ids.shape[1]
            return self.head(torch.cat([self.table(ids).mean(1), stops], 1))

    ids = torch.randint(2, 20, (6, 10))
    for row, stops in enumerate((1, 2, 3, 1, 2, 2)):
        ids[row, 10 - stops :] = 1
    batch = {"tokens": ids, "label": torch.arange(6) % 3}
    return trained(Counts(), batch, lambda m, b: F.cross_entropy(m(b["tokens"]), b["label"]))


@odd(notes="two rows of ids, of which the second alone holds the padding id, drawn as any other")
def id_of_padding_drawn():
    ids = torch.randint(1, 20, (2, 10))
    ids[1, 2:9:3], labels = 0, torch.tensor([0, 1])
    model = nn.ModuleList([nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3)])
    return trained(model, (ids, labels), lambda m, b: F.cross_entropy(m[1](m[0](b[0]).mean(1)), b[1]))


@odd(notes="columns of ids, packed, next to labels in rows of as many as the ids have positions")
def packed_columns():
    lengths = torch.tensor([10, 4, 7, 5])
    ids = torch.randint(1, 20, (10, 4)).masked_fill(torch.arange(10)[:, None] >= lengths, 0)
    model = nn.ModuleList([nn.Embedding(20, 8, padding_idx=0), nn.GRU(8, 12), nn.Linear(12, 10)])

    def loss_of(m, b):
        packed = pack_padded_sequence(m[0](b[0]), (b[0] != 0).sum(0), enforce_sorted=False)
        return F.mse_loss(m[2](m[1](packed)[1][0]), b[1])

    return trained(model, (ids, torch.randn(4, 10)), loss_of)
