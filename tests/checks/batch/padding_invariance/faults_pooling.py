"""Padding that is pooled: in means, in the last position, in the last state of a recurrent net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.pairs import pair
from tests.loops.several_texts import trained

# The last token of a causal model speaks for the text: on the right there is padding.


def listed_lengths(pooled):
    lengths = [12, 8, 10, 5]
    x = torch.randn(4, 12, 6) * (torch.arange(12)[None] < torch.tensor(lengths)[:, None]).unsqueeze(-1)
    batch = {"x": x, "lengths": lengths, "y": torch.tensor([0, 1, 2, 1])}
    model = nn.ModuleList([nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 3)])
    return trained(model, batch, lambda m, b: F.cross_entropy(m[1](pooled(m[0](b["x"]), b["lengths"])), b["y"]))


pair(
    "averaged_over_padding_beside_a_list_of_lengths",
    "padding_invariance",
    "padding_pooled",
    where="states.mean(1)",
    faulty=lambda: listed_lengths(lambda states, lengths: states.mean(1)),
    fixed=lambda: listed_lengths(
        lambda states, lengths: torch.stack([s[:n].mean(0) for s, n in zip(states, lengths, strict=True)])
    ),
)


# A text classifier that makes its mask itself, by the padding id: nothing else says what padding is.


class OfFilters(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.table, self.filters, self.head = nn.Embedding(40, 12), nn.Conv1d(12, 8, 2), nn.Linear(8, 3)
        self.masked = masked

    def forward(self, ids):
        real = ids != 0
        found = torch.relu(self.filters((self.table(ids) * real.unsqueeze(-1)).transpose(1, 2)))
        if self.masked:
            inside = real[:, 1:] & real[:, :-1]
            found = found.masked_fill(~inside.unsqueeze(1), 0.0)
        return self.head(found.amax(2))


def filters(masked):
    lengths = torch.tensor([12, 5, 9, 7, 12, 4])
    ids = torch.randint(1, 40, (6, 12)) * (torch.arange(12)[None] < lengths[:, None])
    batch = {"tokens": ids, "label": torch.arange(6) % 3}
    return trained(OfFilters(masked), batch, lambda m, b: F.cross_entropy(m(b["tokens"]), b["label"]))


pair(
    "largest_of_padded_filters_of_a_model_that_compares_ids",
    "padding_invariance",
    "padding_pooled",
    level="advice",
    faulty=lambda: filters(masked=False),
    fixed=lambda: filters(masked=True),
)


# A mask that the collator makes the wrong way round: the mean is taken over padding.


class MaskedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(40, 12, padding_idx=0), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, ids, mask):
        kept = mask.unsqueeze(-1).float()
        x = self.table(ids)
        return self.head(((x + self.inner(x)) * kept).sum(1) / kept.sum(1).clamp(min=1))


def masked(mask_of):
    lengths = torch.tensor([12, 5, 9, 7, 12, 4])
    ids = torch.randint(1, 40, (6, 12)) * (torch.arange(12)[None] < lengths[:, None])
    batch = {"ids": ids, "mask": mask_of(ids), "label": torch.arange(6) % 3}
    return trained(MaskedMean(), batch, lambda m, b: F.cross_entropy(m(b["ids"], b["mask"]), b["label"]))


pair(
    "mask_that_is_one_at_padding",
    "padding_invariance",
    "padding_pooled",
    mentions=("inverted", "mask_of(ids)"),
    faulty=lambda: masked(lambda ids: ids == 0),
    fixed=lambda: masked(lambda ids: ids != 0),
)


# Texts as columns, as torchtext batches them: the last position is padding in all but the longest
# (https://github.com/keitakurita/practical-torchtext/issues/5).


def columns(last):
    lengths = torch.tensor([12, 5, 9, 7, 11, 4])
    ids = torch.randint(2, 30, (12, 6)).masked_fill(torch.arange(12)[:, None] >= lengths, 1)
    model = nn.ModuleDict(
        {"table": nn.Embedding(30, 8, padding_idx=1), "rnn": nn.LSTM(8, 16), "head": nn.Linear(16, 6)}
    )
    batch = (ids, torch.randint(0, 2, (6, 6)).float())

    def loss_of(m, b):
        states = m["rnn"](m["table"](b[0]))[0]
        return F.binary_cross_entropy_with_logits(m["head"](last(states, (b[0] != 1).sum(0))), b[1])

    return trained(model, batch, loss_of)


pair(
    "last_state_of_columns",
    "padding_invariance",
    "padding_pooled",
    level="advice",
    where="states[-1]",
    faulty=lambda: columns(lambda states, lengths: states[-1]),
    fixed=lambda: columns(lambda states, lengths: states[lengths - 1, torch.arange(6)]),
)
