"""Tensors that a model is called with and does not need."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class GraphConv(nn.Module):
    """Two rounds of messages over ``data.edge_index``; features of edges and places of nodes are for other models."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, graph):
        source, target = graph.edge_index
        h = torch.relu(self.first(graph.x))
        h = h.index_add(0, target, h[source])
        return self.second(h)


@odd(notes="a graph network is called with the whole graph, whose edges have features that it does not read")
def graph_with_features_of_edges_that_are_not_read() -> TrainLoop:
    x, y = data.labelled()
    edges = torch.stack([torch.arange(16), (torch.arange(16) + 3) % 16])
    graph = SimpleNamespace(x=x, edge_index=edges, edge_attr=drawn(16, 4), pos=drawn(16, 2, seed=1), y=y)
    return loop(GraphConv(), graph, lambda m, g: F.cross_entropy(m(g), g.y))


class TakesWhatItKnows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(6, 24, 3)

    def forward(self, features, **others):
        return self.body(features)


@odd(notes="the collate function adds row numbers and times of day; the model is called with **batch")
def metadata_in_a_batch_that_is_passed_whole() -> TrainLoop:
    x, y = data.labelled()
    batch = {"features": x, "row": torch.arange(len(x)) * 37, "hour": torch.arange(len(x)) % 24, "labels": y}
    return loop(TakesWhatItKnows(), batch, lambda m, b: F.cross_entropy(m(**b), b["labels"]))


class LengthsForTheShape(nn.Module):
    """The longest length is the number of frames: of rows cut to one window it changes nothing."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 3)

    def forward(self, ids, lengths):
        window = min(int(lengths.min()), ids.shape[1])
        return self.head(self.embed(ids[:, :window]).mean(1))


@odd(notes="lengths are beyond the window that every row was cut to, and only clamp it")
def lengths_beyond_the_window() -> TrainLoop:
    ids, _ = data.tokens()
    batch = (ids, torch.tensor([12, 17, 23, 40]), ids[:, 0] % 3)
    return loop(LengthsForTheShape(), batch, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


class Dropped(nn.Module):
    """Classifier-free guidance: during the first phase every label is dropped for the null one."""

    def __init__(self, drop):
        super().__init__()
        self.body, self.label, self.head, self.drop = nn.Linear(6, 16), nn.Embedding(4, 16), nn.Linear(16, 6), drop

    def forward(self, x, y):
        y = torch.where(torch.rand(len(y)) < self.drop, 3, y)
        return self.head(torch.tanh(self.body(x) + self.label(y)))


@odd(notes="labels are dropped for all rows while a guided model learns without them")
def labels_dropped_in_the_first_phase() -> TrainLoop:
    x, y = data.labelled()
    return loop(Dropped(1.0), (x, y), lambda m, b: F.mse_loss(m(b[0], b[1]), b[0]))


class CausalWithMask(nn.Module):
    """Right-padded texts in a causal model: no real position looks at padding, so that a mask changes nothing."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(16, 24), nn.GRU(24, 24, batch_first=True), nn.Linear(24, 16)

    def forward(self, ids, attention_mask):
        return self.head(self.rnn(self.embed(ids))[0])


@odd(notes="a causal model of right-padded texts needs no mask: labels at padded positions are ignored")
def causal_model_that_needs_no_mask() -> TrainLoop:
    ids, targets = data.tokens(vocab=15)
    mask = torch.arange(12)[None] < torch.tensor([12, 9, 7, 11])[:, None]
    batch = {"ids": (ids + 1) * mask, "attention_mask": mask, "labels": torch.where(mask, targets + 1, -100)}

    def loss_of(model, b):
        return F.cross_entropy(model(b["ids"], b["attention_mask"]).transpose(1, 2), b["labels"], ignore_index=-100)

    return loop(CausalWithMask(), batch, loss_of)


class Weighted(nn.Module):
    """Edges by their weights alone, which are 0 where there is none; ``edges`` says the same."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x, edges, weights):
        return self.second((weights @ self.first(x)).relu()).mean(1)


@odd(notes="weights of edges are 0 where there is no edge: the 0 and 1 of edges say nothing more")
def edges_beside_their_weights() -> TrainLoop:
    edges = (drawn(6, 5, 5, seed=1) > 0).float()
    batch = {"x": drawn(6, 5, 3), "edges": edges, "weights": edges * drawn(6, 5, 5, seed=2).exp()}
    return loop(
        Weighted(),
        batch | {"y": torch.arange(6) % 2},
        lambda m, b: F.cross_entropy(m(b["x"], b["edges"], b["weights"]), b["y"]),
    )


class FromPast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(8, 16, 4)

    def forward(self, past_target, past_observed):
        return self.net(past_target)


@odd(notes="missing values of the past are 0, and the model reads them so")
def past_values_that_are_missing() -> TrainLoop:
    observed = (drawn(12, 8, seed=4) > -0.8).float()
    batch = {"past_target": (1 + drawn(12, 8).abs()) * observed, "past_observed": observed, "future": drawn(12, 4)}
    return loop(FromPast(), batch, lambda m, b: F.mse_loss(m(b["past_target"], b["past_observed"]), b["future"]))


class Policy(nn.Module):
    """The environment's info goes through ``forward`` to be logged."""

    def __init__(self):
        super().__init__()
        self.body, self.seen = mlp(4, 24, 3), []

    def forward(self, states, info):
        self.seen.append(float(info["reward_so_far"].mean()))
        return self.body(states)


@odd(notes="a policy logs what the environment says beside its states")
def policy_that_logs_the_info_of_its_environment() -> TrainLoop:
    states, actions, returns = data.episode()
    batch = {"states": states, "actions": actions, "returns": returns, "info": {"reward_so_far": returns.cumsum(0)}}

    def loss_of(model, b):
        chosen = model(b["states"], {"reward_so_far": b["info"]["reward_so_far"]})
        return (F.cross_entropy(chosen, b["actions"], reduction="none") * (1 + b["returns"] ** 2)).mean()

    return loop(Policy(), batch, loss_of)


class SegmentsNotUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 3)

    def forward(self, ids, token_type_ids):
        return self.head(self.embed(ids).mean(1))


@odd(notes="the tokenizer gives numbers of segments, for which this encoder has no table")
def segments_that_the_encoder_has_no_table_for() -> TrainLoop:
    ids, _ = data.tokens()
    segments = (torch.arange(12)[None] >= torch.tensor([3, 5, 8, 6])[:, None]).long()
    return loop(SegmentsNotUsed(), (ids, segments, ids[:, 0] % 3), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


def weather(values, *first):
    """Fields of 8 days, which a small net classifies."""
    net = nn.Sequential(*first, nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    return loop(net, (values, torch.arange(8) % 3), lambda m, b: F.cross_entropy(m(b[0]), b[1]))


def field(mean, deviation):
    return mean + deviation * torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(5))


@odd(notes="pressures in pascal vary by half a percent, and a batch norm comes first")
def pressures_that_the_model_normalises() -> TrainLoop:
    return weather(field(101_325.0, 500.0), nn.BatchNorm2d(1))


@odd(notes="temperatures in kelvin, divided by their usual size")
def temperatures_in_kelvin() -> TrainLoop:
    return weather(field(280.0, 10.0) / 280.0)


@odd(notes="a soft mask that is 1 nearly everywhere: few values")
def soft_mask_of_few_values() -> TrainLoop:
    return weather(1 - 0.02 * (field(0.0, 1.0) > 1).float())
