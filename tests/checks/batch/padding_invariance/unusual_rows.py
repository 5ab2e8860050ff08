"""Embeddings whose row of ``padding_idx`` is not zero, in loops that are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from pytest_trainloop import TrainLoop
from tests.checks.batch.padding_invariance.faults_rows import Basket, baskets, every_matrix
from tests.loops.odd import odd
from tests.loops.several_texts import trained


def shopping(model) -> TrainLoop:
    return trained(model, baskets(), lambda m, b: F.cross_entropy(m(b["items"], b["sizes"]), b["bought"]))


def there(items, sizes):
    return (torch.arange(items.shape[1]) < sizes[:, None])[..., None]


@odd(notes="the row of padding is drawn with the others, and the sum leaves it out")
def drawn_row_that_a_mask_leaves_out() -> TrainLoop:
    class Masked(Basket):
        def forward(self, items, sizes):
            return self.scores((self.items(items) * there(items, sizes)).sum(1) / sizes[:, None])

    return shopping(Masked(every_matrix))


@odd(notes="the row of padding is drawn with the others, and a recurrent net ends before it")
def drawn_row_behind_packed_rows() -> TrainLoop:
    class Packed(Basket):
        def __init__(self):
            super().__init__(every_matrix)
            self.rnn = nn.GRU(12, 12, batch_first=True)

        def forward(self, items, sizes):
            packed = pack_padded_sequence(self.items(items), sizes, batch_first=True, enforce_sorted=False)
            return self.scores(self.rnn(packed)[1][0])

    return shopping(Packed())


@odd(notes="the row of padding is drawn with the others, and no query of the attention sees it as a key")
def drawn_row_that_no_query_sees() -> TrainLoop:
    class Seen(Basket):
        def __init__(self):
            super().__init__(every_matrix)
            self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

        def forward(self, items, sizes):
            x, hidden = self.items(items), ~there(items, sizes)[..., 0]
            return self.scores(self.attention(x[:, :1], x, x, key_padding_mask=hidden)[0][:, 0])

    return shopping(Seen())


@odd(notes="a table from a file has values in the row of padding, which the mean leaves out")
def table_of_a_file_with_a_row_for_padding() -> TrainLoop:
    vectors = torch.linspace(-1, 1, 360).sin().view(30, 12)

    class Loaded(Basket):
        def __init__(self):
            super().__init__(lambda model: None)
            self.items = nn.Embedding.from_pretrained(vectors.clone(), freeze=False, padding_idx=0)

        def forward(self, items, sizes):
            return self.scores(self.items(items).where(there(items, sizes), 0).sum(1) / sizes[:, None])

    return shopping(Loaded())
