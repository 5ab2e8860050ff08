"""Embeddings whose row of ``padding_idx`` is drawn with the others: padding adds random numbers to a sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.pairs import pair
from tests.loops.several_texts import trained


def baskets(rows=8, most=6):
    sizes = 2 + torch.arange(rows) % (most - 1)
    items = torch.randint(1, 30, (rows, most)) * (torch.arange(most) < sizes[:, None])
    return {"items": items, "sizes": sizes, "bought": (items[:, 0] % 4).long()}


class Basket(nn.Module):
    """The mean of the items of a basket, and scores for the next one."""

    def __init__(self, start):
        super().__init__()
        self.items = nn.Embedding(30, 12, padding_idx=0)
        self.scores = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
        start(self)

    def forward(self, items, sizes):
        return self.scores(self.items(items).sum(1) / sizes[:, None])


def shopping(start):
    return trained(Basket(start), baskets(), lambda m, b: F.cross_entropy(m(b["items"], b["sizes"]), b["bought"]))


def every_matrix(model):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)


def every_matrix_and_zeros(model):
    every_matrix(model)
    with torch.no_grad():
        model.items.weight[model.items.padding_idx] = 0


pair(
    "xavier_over_the_row_of_padding",
    "padding_invariance",
    "pad_row_drawn",
    culprits=("items.weight",),
    change="nn.init.xavier_uniform_(parameter)",
    quick=True,
    faulty=lambda: shopping(every_matrix),
    fixed=lambda: shopping(every_matrix_and_zeros),
)


class Reviews(nn.Module):
    """A bag of words, of which 39 is the id of padding."""

    def __init__(self, first_row):
        super().__init__()
        self.words, self.out = nn.Embedding(40, 16, padding_idx=39), nn.Linear(16, 3)
        self.words.weight.data[:first_row].uniform_(-0.5, 0.5)
        self.out.bias.data.zero_()

    def forward(self, ids):
        return self.out(self.words(ids).sum(dim=1).tanh())


def reviews(first_row):
    lengths = torch.tensor([9, 4, 6, 9, 3, 7])
    mask = torch.arange(9) < lengths[:, None]
    ids = torch.randint(0, 39, (6, 9)).masked_fill(~mask, 39)
    batch = {"ids": ids, "mask": mask, "stars": ids[:, 0] % 3}
    return trained(Reviews(first_row), batch, lambda m, b: F.cross_entropy(m(b["ids"]), b["stars"]))


pair(
    "uniform_rows_with_that_of_padding",
    "padding_invariance",
    "pad_row_drawn",
    culprits=("words.weight",),
    change="self.words.weight.data[:first_row].uniform_(-0.5, 0.5)",
    faulty=lambda: reviews(40),
    fixed=lambda: reviews(39),
)
