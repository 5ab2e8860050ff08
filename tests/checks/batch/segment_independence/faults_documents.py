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


class OwnLoss(PackedDecoder):
    """Gives the loss alone, as trainers of language models want it."""

    def forward(self, input_ids, position_ids, labels):
        scores = super().forward(input_ids, position_ids)[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


def in_one_row(position_ids):
    return within_documents(position_ids) if len(position_ids) == 1 else everything_before(position_ids)


def packed_rows(mask):
    def make():
        rows = packed_documents(), packed_documents((5, 8, 7))
        batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return loop(OwnLoss(mask), batch, lambda model, b: model(**b))

    return make


pair(
    "rows_of_packed_documents_are_masked_only_where_there_is_one",
    "segment_independence",
    "segments_interact",
    faulty=packed_rows(in_one_row),
    fixed=packed_rows(within_documents),
    mentions=("row alone",),
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


# Documents that only their numbers tell, under a name of the project's own.


class Numbered(nn.Module):
    """Causal attention within each document. ``place`` gives what is added by position, and ``turn`` turns queries and
    keys by it."""

    def __init__(self, place=None, *, apart="always", turn=False, context=32, vocab=24, width=16):
        super().__init__()
        self.tokens, self.table = nn.Embedding(vocab, width), None if place is None else nn.Embedding(context, width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, vocab)
        self.place, self.apart, self.turn = place, apart, turn

    def forward(self, tokens, doc):
        hidden = self.tokens(tokens)
        if self.table is not None:
            hidden = hidden + self.table(self.place(doc))
        query, key, value = self.qkv(hidden).chunk(3, -1)
        if self.turn:
            query, key = turned(query), turned(key)
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        if self.apart == "always" or (self.apart == "in evaluation" and not self.training):
            seen = seen & (doc[:, :, None] == doc[:, None])
        scores = (query @ key.mT / 4).masked_fill(~seen, -torch.inf)
        return self.head(hidden + self.out(scores.softmax(-1) @ value))


def turned(x):
    """Rotary positions that count through the row: only distances matter."""
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10 ** torch.arange(0, 2, 0.25, dtype=x.dtype)
    one, other = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


def run_on(doc):
    return torch.arange(doc.shape[1]).expand_as(doc)


def start_again(doc):
    first = torch.cat([torch.ones_like(doc[:, :1], dtype=torch.bool), doc[:, 1:] != doc[:, :-1]], 1)
    places = run_on(doc)
    return places - (places * first).cummax(1).values


def numbers_of_documents(lengths=((4, 7, 3, 6), (6, 5, 9))):
    return torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths])


def by_numbers(borders=True, first=0, numbers=numbers_of_documents, **fields):
    """``borders``: whether the first token of a document is no target; ``first``: the number of the first document."""
    declared = {name: fields.pop(name) for name in ("rows_interact",) if name in fields}

    def make():
        doc = numbers()
        batch = {"tokens": torch.randint(24, doc.shape, generator=torch.Generator().manual_seed(3)), "doc": doc + first}

        def loss_of(model, b):
            after = b["tokens"][:, 1:]
            if borders:
                after = after.masked_fill(b["doc"][:, 1:] != b["doc"][:, :-1], -100)
            return F.cross_entropy(model(b["tokens"], b["doc"])[:, :-1].flatten(0, 1), after.flatten())

        return loop(Numbered(**fields), batch, loss_of, **declared)

    return make


pair(
    "documents_of_an_unusual_name_see_each_other",
    "segment_independence",
    "segments_interact",
    faulty=by_numbers(apart="", first=27),
    fixed=by_numbers(first=27),
    level="advice",
    where="softmax(-1)",
)

pair(
    "documents_declared_apart_see_each_other_in_training",
    "segment_independence",
    "segments_interact",
    faulty=by_numbers(apart="in evaluation", rows_interact=False),
    fixed=by_numbers(rows_interact=False),
    where="softmax(-1)",
)

pair(
    "last_token_of_documents_of_an_unusual_name_predicts_the_next",
    "segment_independence",
    "labels_across_documents",
    faulty=by_numbers(borders=False),
    fixed=by_numbers(),
    level="advice",
    where="F.cross_entropy",
)

pair(
    "positions_count_through_packed_documents",
    "segment_independence",
    "positions_run_on",
    faulty=by_numbers(place=run_on),
    fixed=by_numbers(place=start_again),
    level="advice",
    where="self.table(self.place(doc))",
    culprits=("embedding in table",),
    quick=True,
)


class MaskedOnly(Numbered):
    """The mask of each row says which documents there are, and nothing else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.sin(torch.arange(32)[:, None] / 1.5 ** torch.arange(16)))

    def forward(self, tokens, mask, places):
        hidden = self.tokens(tokens) + self.waves[places]
        query, key, value = self.qkv(hidden).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(hidden + self.out(mixed))


def by_mask(place):
    def make():
        doc = numbers_of_documents()
        tokens = torch.randint(24, doc.shape, generator=torch.Generator().manual_seed(3))
        batch = {"tokens": tokens, "mask": (doc[:, :, None] == doc[:, None]).tril(), "places": place(doc)}
        batch["after"] = tokens.roll(-1, 1).masked_fill(doc != doc.roll(-1, 1), -100)

        def loss_of(model, b):
            scores = model(b["tokens"], b["mask"], b["places"])
            return F.cross_entropy(scores.flatten(0, 1), b["after"].flatten())

        return loop(MaskedOnly(), batch, loss_of, rows_interact=False)

    return make


pair(
    "fixed_positions_count_through_documents_kept_apart_by_a_mask",
    "segment_independence",
    "positions_run_on",
    faulty=by_mask(run_on),
    fixed=by_mask(start_again),
)
