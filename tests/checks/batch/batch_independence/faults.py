"""Rows of a batch that meet in the model."""

from __future__ import annotations

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


# Nodes of all graphs in one axis, and a norm that takes them for one graph.


class GraphNet(nn.Module):
    def __init__(self, each_graph):
        super().__init__()
        self.body, self.head, self.each_graph = nn.Linear(6, 14), nn.Linear(14, 3), each_graph

    def norm(self, nodes, graphs):
        if self.each_graph:
            graph = torch.arange(graphs).repeat_interleave(len(nodes) // graphs)
            mean = nodes.new_zeros(graphs).index_add(0, graph, nodes.mean(1)) / (len(nodes) // graphs)
            return nodes - mean[graph][:, None]
        nodes = nodes - nodes.mean()
        return nodes / (nodes.square().mean() + 1e-5).sqrt()

    def forward(self, x):
        graphs, nodes, _ = x.shape
        hidden = torch.relu(self.norm(self.body(x).flatten(0, 1), graphs))
        return self.head(hidden.view(graphs, nodes, -1).mean(1))


def graphs(each_graph):
    def make():
        x = torch.randn(8, 9, 6, generator=torch.Generator().manual_seed(5))
        return loop(GraphNet(each_graph), (x, torch.arange(8) % 3), cross_entropy)

    return make


pair(
    "graphs_normalised_as_one",
    "batch_independence",
    "normalised_over_rows",
    where="nodes = nodes - nodes.mean()",
    faulty=graphs(each_graph=False),
    fixed=graphs(each_graph=True),
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


# A view where a transpose is meant.


class TimeFirst(nn.Module):
    def __init__(self, to_time_first):
        super().__init__()
        self.rnn, self.head, self.to_time_first = nn.GRU(4, 16), nn.Linear(16, 3), to_time_first

    def forward(self, x):
        hidden, _ = self.rnn(self.to_time_first(x))
        return self.head(hidden[-1])


pair(
    "view_for_transpose_before_a_gru",
    "batch_independence",
    "view_mixes_rows",
    where="view",
    faulty=lambda: loop(TimeFirst(lambda x: x.view(x.shape[1], x.shape[0], -1)), sequences(), cross_entropy),
    fixed=lambda: loop(TimeFirst(lambda x: x.transpose(0, 1)), sequences(), cross_entropy),
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


# Outputs and labels in another order.


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
    "time_first_scores_against_row_first_labels",
    "batch_independence",
    "labels_of_other_rows",
    where="return F.cross_entropy(scores.flatten(0, 1), labels.flatten())",
    faulty=per_step(restores=False),
    fixed=per_step(restores=True),
)


def tagged(both):
    """Tags of five kinds: neighbours of a row, and the ends of rows, often hold the same."""

    def make():
        ids, past = data.tokens(8, vocab=20)[0], torch.arange(12) >= torch.tensor([12, 5, 9, 7] * 2)[:, None]
        batch = {"ids": ids.masked_fill(past, 0), "tags": (ids % 5).masked_fill(past, -100)}

        def loss_of(model, batch):
            scores = model(batch["ids"]).transpose(0, 1).flatten(0, 1)
            tags = batch["tags"].t() if both else batch["tags"]
            return F.cross_entropy(scores, tags.flatten(), ignore_index=-100)

        return loop(nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 5)), batch, loss_of)

    return make


pair(
    "transposed_scores_against_padded_tags",
    "batch_independence",
    "labels_of_other_rows",
    change='scores = model(batch["ids"]).transpose(0, 1).flatten(0, 1)',
    faulty=tagged(both=False),
    fixed=tagged(both=True),
)
