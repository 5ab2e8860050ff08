"""Rows of a batch that meet in the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop


def sequences(rows=8, length=10, features=4, classes=3):
    g = torch.Generator().manual_seed(5)
    labels = torch.arange(rows) % classes
    waves = torch.sin(torch.arange(length)[None, :, None] * (labels + 1)[:, None, None] * 0.4)
    return waves + 0.2 * torch.randn(rows, length, features, generator=g), labels


def sentences(rows=8, length=9, vocab=20):
    ids, _ = data.tokens(rows=rows, length=length, vocab=vocab)
    return {"input_ids": ids, "labels": ids[:, 0] % 3}


# A softmax over the rows: written out, by a module without its dim, over experts.


class Gated(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(4))
        self.gate, self.head, self.dim = nn.Linear(6, 4), nn.Linear(8, 3), dim

    def forward(self, x):
        weights = F.softmax(self.gate(x), dim=self.dim)
        mixed = sum(weights[:, n : n + 1] * expert(x) for n, expert in enumerate(self.experts))
        return self.head(torch.tanh(mixed))


class Pooled(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed, self.score, self.head = nn.Embedding(20, 16), nn.Linear(16, 2), nn.Linear(32, 3)
        self.softmax = nn.Softmax(dim=dim)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        weights = self.softmax(self.score(hidden))
        return self.head(torch.einsum("ntk,ntd->nkd", weights, hidden).flatten(1))


def pooled(dim):
    def make():
        return loop(Pooled(dim), sentences(), lambda m, b: F.cross_entropy(m(b["input_ids"]), b["labels"]))

    return make


pair(
    "experts_weighed_over_the_rows",
    "batch_independence",
    "softmax_over_rows",
    where="weights = F.softmax(self.gate(x), dim=self.dim)",
    faulty=lambda: loop(Gated(0), data.labelled(), cross_entropy),
    fixed=lambda: loop(Gated(-1), data.labelled(), cross_entropy),
)
pair(
    "attention_pooling_over_the_rows",
    "batch_independence",
    "softmax_over_rows",
    culprits=("softmax in softmax",),
    where="weights = self.softmax(self.score(hidden))",
    faulty=pooled(0),
    fixed=pooled(1),
)


# Rows normalised by each other.


class Normalised(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.body, self.head, self.norm = nn.Linear(6, 16), nn.Linear(16, 3), norm

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.body(x))))


def standardised(hidden):
    return (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-5)


def over_everything(hidden):
    return 4 * hidden / hidden.norm()


def layer_norm_over_everything(hidden):
    return F.layer_norm(hidden, hidden.shape)


for title, norm, own in (
    ("columns_brought_to_length_one", lambda h: F.normalize(h, dim=0), lambda h: F.normalize(h, dim=1)),
    ("columns_standardised_by_hand", standardised, lambda h: F.layer_norm(h, h.shape[-1:])),
    ("a_batch_divided_by_its_norm", over_everything, lambda h: 4 * h / h.norm(dim=1, keepdim=True)),
    ("layer_norm_over_the_whole_batch", layer_norm_over_everything, lambda h: F.layer_norm(h, h.shape[1:])),
):
    pair(
        title,
        "batch_independence",
        "normalised_over_rows",
        mentions=("not each alone",),
        faulty=lambda norm=norm: loop(Normalised(norm), data.labelled(), cross_entropy),
        fixed=lambda own=own: loop(Normalised(own), data.labelled(), cross_entropy),
    )


# batch_first forgotten: the layer walks over the rows.


class LastStep(nn.Module):
    def __init__(self, cell, **kwargs):
        super().__init__()
        self.rnn, self.head = cell(4, 16, **kwargs), nn.Linear(16, 3)

    def forward(self, x):
        hidden, _ = self.rnn(x)
        return self.head(hidden[:, -1])


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids):
        return self.head(self.layer(self.embed(input_ids)).mean(1))


class Translator(nn.Module):
    """The encoder is right, the decoder is not."""

    def __init__(self, batch_first):
        super().__init__()
        self.source, self.target = nn.Embedding(20, 16), nn.Embedding(20, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRU(32, 16, batch_first=batch_first)
        self.head = nn.Linear(16, 20)

    def forward(self, source, target):
        _, state = self.encoder(self.source(source))
        context = state[-1][:, None].expand(-1, target.shape[1], -1)
        hidden, _ = self.decoder(torch.cat([self.target(target), context], -1))
        return self.head(hidden)


@dataclass
class Sentence:
    source: torch.Tensor
    target: torch.Tensor
    lengths: torch.Tensor


def translation(batch_first):
    def make():
        ids, after = data.tokens(rows=6, length=9, vocab=20)
        batch = Sentence(ids.flip(1)[:, :7].contiguous(), after, torch.tensor([7, 7, 5, 7, 6, 7]))

        def loss_of(model, batch):
            scores = model(batch.source, batch.target[:, :-1])
            return F.cross_entropy(scores.flatten(0, 1), batch.target[:, 1:].flatten())

        return loop(Translator(batch_first), batch, loss_of)

    return make


def encoder(batch_first):
    def make():
        return loop(Encoder(batch_first), sentences(), lambda m, b: F.cross_entropy(m(b["input_ids"]), b["labels"]))

    return make


pair(
    "lstm_walks_over_the_rows",
    "batch_independence",
    "rows_as_positions",
    culprits=("lstm in rnn",),
    where="hidden, _ = self.rnn(x)",
    faulty=lambda: loop(LastStep(nn.LSTM), sequences(), cross_entropy),
    fixed=lambda: loop(LastStep(nn.LSTM, batch_first=True), sequences(), cross_entropy),
)
pair(
    "transformer_attends_to_other_rows",
    "batch_independence",
    "rows_as_positions",
    culprits=("multi_head_attention_forward in layer.self_attn",),
    faulty=encoder(False),
    fixed=encoder(True),
)
pair(
    "only_the_decoder_walks_over_the_rows",
    "batch_independence",
    "rows_as_positions",
    culprits=("gru in decoder",),
    faulty=translation(False),
    fixed=translation(True),
)


# A view where a transpose is meant.


class TimeFirst(nn.Module):
    def __init__(self, to_time_first):
        super().__init__()
        self.rnn, self.head, self.to_time_first = nn.GRU(4, 16), nn.Linear(16, 3), to_time_first

    def forward(self, x):
        hidden, _ = self.rnn(self.to_time_first(x))
        return self.head(hidden[-1])


class Flattened(nn.Module):
    def __init__(self, in_order):
        super().__init__()
        self.rnn, self.head, self.in_order = nn.GRU(4, 8), nn.Linear(80, 3), in_order

    def forward(self, x):
        hidden, _ = self.rnn(x.transpose(0, 1))
        hidden = hidden.transpose(0, 1) if self.in_order else hidden
        return self.head(hidden.reshape(len(x), -1))


pair(
    "view_for_transpose_before_a_gru",
    "batch_independence",
    "view_mixes_rows",
    where="view",
    faulty=lambda: loop(TimeFirst(lambda x: x.view(x.shape[1], x.shape[0], -1)), sequences(), cross_entropy),
    fixed=lambda: loop(TimeFirst(lambda x: x.transpose(0, 1)), sequences(), cross_entropy),
)
pair(
    "time_first_states_flattened_by_rows",
    "batch_independence",
    "view_mixes_rows",
    where="return self.head(hidden.reshape(len(x), -1))",
    faulty=lambda: loop(Flattened(in_order=False), sequences(), cross_entropy),
    fixed=lambda: loop(Flattened(in_order=True), sequences(), cross_entropy),
)


# Rows that meet in a way that may be meant, until the project says that they must not.


class Neighbours(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.body, self.head, self.mixes = nn.Linear(6, 16), nn.Linear(16, 3), mixes

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        if self.mixes:
            hidden = hidden + (hidden @ hidden.T / 4).softmax(-1) @ hidden
        return self.head(hidden)


pair(
    "rows_attend_to_each_other_though_declared_apart",
    "batch_independence",
    "rows_interact",
    faulty=lambda: loop(Neighbours(True), data.labelled(), cross_entropy, rows_interact=False),
    fixed=lambda: loop(Neighbours(False), data.labelled(), cross_entropy, rows_interact=False),
)


# A batch norm that keeps no running statistics: in evaluation, too, an example sees the others.


class Normed(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16, track_running_stats=keeps)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).tanh())


pair(
    "statistics_of_the_batch_in_evaluation_though_declared_apart",
    "batch_independence",
    "rows_interact",
    culprits=("batch_norm in norm",),
    where="self.norm(self.body(x))",
    faulty=lambda: loop(Normed(keeps=False), data.labelled(), cross_entropy, rows_interact=False),
    fixed=lambda: loop(Normed(keeps=True), data.labelled(), cross_entropy, rows_interact=False),
)


# Statistics that may be meant, as a discriminator's.


class MinibatchSpread(nn.Module):
    def __init__(self, joins):
        super().__init__()
        self.body, self.head, self.joins = nn.Linear(6, 16), nn.Linear(17, 3), joins

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        spread = hidden.std(0).mean().expand(len(x), 1) if self.joins else hidden.std(1, keepdim=True)
        return self.head(torch.cat([hidden, spread], 1))


pair(
    "a_statistic_of_the_batch_beside_each_row",
    "batch_independence",
    "rows_interact",
    level="advice",
    culprits=("std in MinibatchSpread",),
    faulty=lambda: loop(MinibatchSpread(True), data.labelled(), cross_entropy),
    fixed=lambda: loop(MinibatchSpread(False), data.labelled(), cross_entropy),
)


# Outputs and labels in another order.


class SortedByLength(nn.Module):
    def __init__(self, restores):
        super().__init__()
        self.rnn, self.head, self.restores = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 3), restores

    def forward(self, x, lengths):
        order = lengths.argsort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(x[order], lengths[order], batch_first=True)
        _, state = self.rnn(packed)
        return self.head(state[-1][order.argsort()] if self.restores else state[-1])


def by_length(restores):
    def make():
        x, labels = sequences()
        lengths = torch.tensor([4, 10, 6, 9, 3, 10, 8, 5])
        batch = {"x": x * (torch.arange(10)[None] < lengths[:, None])[..., None], "lengths": lengths, "labels": labels}
        return loop(SortedByLength(restores), batch, lambda m, b: F.cross_entropy(m(b["x"], b["lengths"]), b["labels"]))

    return make


class PerStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.rnn(x.transpose(0, 1))[0])


def per_step(restores):
    def make():
        x, labels = sequences()
        batch = (x, (labels[:, None] + torch.arange(10)) % 3, torch.ones(8))

        def loss_of(model, batch):
            x, labels, _ = batch
            scores = model(x).transpose(0, 1) if restores else model(x)
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten())

        return loop(PerStep(), batch, loss_of)

    return make


pair(
    "rows_sorted_by_length_and_not_put_back",
    "batch_independence",
    "labels_of_other_rows",
    where='F.cross_entropy(m(b["x"], b["lengths"]), b["labels"])',
    change="pack_padded_sequence(x[order]",
    mentions=("put sorted rows back",),
    faulty=by_length(restores=False),
    fixed=by_length(restores=True),
)
pair(
    "time_first_scores_against_row_first_labels",
    "batch_independence",
    "labels_of_other_rows",
    where="return F.cross_entropy(scores.flatten(0, 1), labels.flatten())",
    mentions=("scores.transpose(0, 1)", "meet the labels of one"),
    faulty=per_step(restores=False),
    fixed=per_step(restores=True),
)
