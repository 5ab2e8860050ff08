"""Documents packed into one row that see each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.pairs import pair
from tests.loops.plain import loop
from tests.loops.segmented import PackedDecoder, everything_before, next_token, packed_documents, within_documents


def packed(mask, **fields):
    return lambda: loop(PackedDecoder(mask), packed_documents(), next_token, **fields)


pair(
    "packed_documents_see_those_before",
    "segment_independence",
    "segments_interact",
    faulty=packed(everything_before),
    fixed=packed(within_documents),
    level="advice",
    where="softmax(-1)",
    mentions=("documents",),
    quick=True,
)

pair(
    "packed_documents_declared_apart_see_those_before",
    "segment_independence",
    "segments_interact",
    faulty=packed(everything_before, rows_interact=False),
    fixed=packed(within_documents, rows_interact=False),
    where="softmax(-1)",
)


class Recurrent(nn.Module):
    """A recurrent net over the row, that starts again at each document or does not."""

    def __init__(self, *, restarts):
        super().__init__()
        self.tokens, self.recurrent, self.head = (
            nn.Embedding(24, 16),
            nn.GRU(16, 16, batch_first=True),
            nn.Linear(16, 24),
        )
        self.restarts = restarts

    def forward(self, input_ids, seq_idx):
        hidden = self.tokens(input_ids)
        if not self.restarts:
            return self.head(self.recurrent(hidden)[0])
        counts = seq_idx[0].bincount().tolist()
        return self.head(torch.cat([self.recurrent(part)[0] for part in hidden.split(counts, 1)], 1))


def numbered(*, restarts):
    def make():
        batch = packed_documents()
        batch["seq_idx"] = (batch.pop("position_ids") == 0).cumsum(1) - 1

        def loss_of(model, b):
            scores = model(b["input_ids"], b["seq_idx"])[:, :-1]
            return F.cross_entropy(scores.flatten(0, 1), b["labels"][:, 1:].flatten())

        return loop(Recurrent(restarts=restarts), batch, loss_of)

    return make


pair(
    "recurrent_net_runs_on_into_the_next_document",
    "segment_independence",
    "segments_interact",
    faulty=numbered(restarts=False),
    fixed=numbered(restarts=True),
    level="advice",
    culprits=("gru in recurrent",),
)


def labelled(labels, **fields):
    return lambda: loop(PackedDecoder(within_documents), packed_documents(labels=labels), next_token, **fields)


pair(
    "last_token_predicts_the_next_document",
    "segment_independence",
    "labels_across_documents",
    faulty=labelled("token"),
    fixed=labelled("border"),
    level="advice",
    where="F.cross_entropy",
    quick=True,
)

pair(
    "last_token_of_a_document_declared_apart_predicts_the_next",
    "segment_independence",
    "labels_across_documents",
    faulty=labelled("token", rows_interact=False),
    fixed=labelled("border", rows_interact=False),
)


def two_tellers(*, shifted):
    """Borders for a kernel beside positions, from the lengths of the texts before and after an end token was added."""

    def make():
        batch = packed_documents()
        lengths = torch.tensor([4, 6, 3, 7])
        batch["cu_seqlens"] = torch.cat([torch.zeros(1), (lengths - shifted).cumsum(0)]).long()
        batch["cu_seqlens"][-1] = 20
        return loop(PackedDecoder(within_documents), batch, next_token)

    return make


pair(
    "borders_without_the_end_tokens",
    "segment_independence",
    "borders_disagree",
    faulty=two_tellers(shifted=1),
    fixed=two_tellers(shifted=0),
    culprits=("cu_seqlens", "position_ids"),
    quick=True,
)
