"""Right loops in which the id of the padding is not that of the model's table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
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
