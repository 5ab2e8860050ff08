"""The graph is cut inside the model: detach, data, lists, numpy, an index in the middle."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, TwoTower, contrast, mlp
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"


def loop(network, batch, loss, lr=5e-3):
    def make():
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)

        def fit(batches):
            model.train()
            for batch in batches:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch(), loss=loss, fit=fit)

    return make


def cut(name, where, culprits, broken, whole, batch, loss, **options):
    pair(
        name,
        CHECK,
        "graph_cut",
        culprits=culprits,
        where=where,
        faulty=loop(broken, batch, loss, **options),
        fixed=loop(whole, batch, loss, **options),
    )


# An autoencoder whose code is detached.


class DetachedCode(AutoEncoder):
    def forward(self, x):
        code = self.encoder(x).detach()
        return self.decoder(code)


def reconstruct(model, batch):
    return F.mse_loss(model(batch[0]), batch[0])


cut(
    "autoencoder_code_detached",
    "code = self.encoder(x).detach()",
    ("encoder.0.weight", "encoder.2.bias"),
    DetachedCode,
    AutoEncoder,
    data.table,
    reconstruct,
)


# Sequence to sequence: the decoder starts from the encoder's state, as data.


class Seq2Seq(nn.Module):
    def __init__(self, vocab=16, width=24):
        super().__init__()
        self.source = nn.Embedding(vocab, width)
        self.target = nn.Embedding(vocab, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def encode(self, source):
        return self.encoder(self.source(source))[1]

    def forward(self, source, target):
        decoded, _ = self.decoder(self.target(target), self.encode(source))
        return self.out(decoded)


class Seq2SeqStateAsData(Seq2Seq):
    def encode(self, source):
        hidden, cell = self.encoder(self.source(source))[1]
        return hidden.data, cell.data


def translate(model, batch):
    source, target = batch
    return F.cross_entropy(model(source, target[:, :-1]).transpose(1, 2), target[:, 1:])


cut(
    "seq2seq_state_as_data",
    "return hidden.data, cell.data",
    ("source.weight", "encoder.weight_ih_l0"),
    Seq2SeqStateAsData,
    Seq2Seq,
    data.tokens,
    translate,
)


# Two towers: one side goes through a cache of plain lists.


class CachedTower(TwoTower):
    def forward(self, left, right):
        users = torch.tensor(self.left(left).cpu().tolist())
        return F.normalize(users, dim=-1) @ F.normalize(self.right(right), dim=-1).T


def match(model, batch):
    return contrast(model(*batch))


cut(
    "tower_through_a_list",
    "torch.tensor(self.left(left).cpu().tolist())",
    ("left.0.weight", "left.2.bias"),
    CachedTower,
    TwoTower,
    data.views,
    match,
)


# Features standardised in numpy.


class Standardised(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(80, 1)

    def standardise(self, features):
        return (features - features.mean(1, keepdim=True)) / (features.std(1, keepdim=True) + 1e-5)

    def forward(self, x):
        return self.head(self.standardise(self.stem(x.transpose(1, 2))).flatten(1))


class StandardisedInNumpy(Standardised):
    def standardise(self, features):
        values = features.detach().cpu().numpy()
        values = (values - np.mean(values)) / (np.std(values) + 1e-5)
        return torch.from_numpy(values)


def forecast(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


cut(
    "features_through_numpy",
    "values = features.detach().cpu().numpy()",
    ("stem.0.weight", "stem.0.bias"),
    StandardisedInNumpy,
    Standardised,
    data.series,
    forecast,
)


# A recurrent cell unrolled by hand; states are collected into a tensor.


class Unrolled(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.width = width
        self.cell = nn.GRUCell(1, width)
        self.query = nn.Parameter(torch.randn(width) * 0.3)
        self.out = nn.Linear(width, 1)

    def states(self, x):
        state = x.new_zeros(len(x), self.width)
        collected = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            collected.append(state)
        return torch.stack(collected, dim=1)

    def forward(self, x):
        states = self.states(x)
        weights = (states @ self.query).softmax(1)
        return self.out((weights.unsqueeze(-1) * states).sum(1))


class UnrolledIntoMemory(Unrolled):
    def states(self, x):
        state = x.new_zeros(len(x), self.width)
        memory = x.new_zeros(len(x), x.shape[1], self.width)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            memory.data[:, t] = state
        return memory


class UnrolledIntoNewTensor(Unrolled):
    def states(self, x):
        states = super().states(x)
        return torch.stack([torch.tensor(states[:, t].tolist()) for t in range(x.shape[1])], dim=1)


cut(
    "states_written_through_data",
    "memory.data[:, t] = state",
    ("cell.weight_ih", "cell.weight_hh"),
    UnrolledIntoMemory,
    Unrolled,
    data.series,
    forecast,
)
cut(
    "states_wrapped_again",
    "torch.tensor(states[:, t].tolist())",
    ("cell.weight_ih", "cell.weight_hh"),
    UnrolledIntoNewTensor,
    Unrolled,
    data.series,
    forecast,
)


# A quantised code (VQ-VAE): the nearest entry without the straight-through step.


class VQ(nn.Module):
    def __init__(self, codes=64, width=2):
        super().__init__()
        self.encoder = mlp(6, 24, width)
        self.codebook = nn.Embedding(codes, width)
        self.decoder = mlp(width, 24, 6)
        nn.init.normal_(self.codebook.weight, std=0.4)

    def nearest(self, z):
        return torch.cdist(z, self.codebook.weight).argmin(dim=-1)

    def loss(self, x):
        z = self.encoder(x)
        q = self.codebook(self.nearest(z))
        straight = z + (q - z).detach()
        commit = F.mse_loss(q, z.detach()) + F.mse_loss(z, q.detach())
        return F.mse_loss(self.decoder(straight), x) + commit


class VQWithoutStraightThrough(VQ):
    def loss(self, x):
        q = self.codebook(self.nearest(self.encoder(x)))
        return F.mse_loss(self.decoder(q), x)


cut(
    "vq_without_straight_through",
    "argmin(dim=-1)",
    ("encoder.0.weight", "encoder.2.weight"),
    VQWithoutStraightThrough,
    VQ,
    data.table,
    lambda model, batch: model.loss(batch[0]),
)


# A mixture of experts: the router picks, but its probability never enters the output.


class MoE(nn.Module):
    def __init__(self, experts=2, width=16):
        super().__init__()
        self.lift = nn.Linear(6, width, bias=False)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(mlp(width, width, width) for _ in range(experts))
        self.out = nn.Linear(width, 1)

    def route(self, x):
        probabilities = self.router(x).softmax(dim=-1)
        return F.one_hot(probabilities.argmax(dim=-1), len(self.experts)) * probabilities

    def forward(self, x):
        x = torch.tanh(self.lift(x))
        weights = self.route(x).unsqueeze(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], dim=1)
        return self.out(x + (weights * mixed).sum(1))


class HardMoE(MoE):
    def route(self, x):
        chosen = self.router(x).argmax(dim=-1)
        return F.one_hot(chosen, len(self.experts)).to(x.dtype)


cut(
    "router_only_picks",
    "self.router(x).argmax(dim=-1)",
    ("router.weight",),
    HardMoE,
    MoE,
    lambda: data.table(rows=32),
    forecast,
)


# A gate by comparison.


class Gated(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.value = nn.Linear(6, width)
        self.gate = nn.Linear(6, width)
        self.out = nn.Linear(width, 1)

    def opened(self, x):
        return torch.sigmoid(self.gate(x))

    def forward(self, x):
        return self.out(torch.tanh(self.value(x)) * self.opened(x))


class GatedByComparison(Gated):
    def opened(self, x):
        return (torch.sigmoid(self.gate(x)) > 0.5).to(x.dtype)


cut(
    "gate_by_comparison",
    "(torch.sigmoid(self.gate(x)) > 0.5)",
    ("gate.weight", "gate.bias"),
    GatedByComparison,
    Gated,
    data.table,
    forecast,
)
