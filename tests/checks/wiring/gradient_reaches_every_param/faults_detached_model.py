"""The graph is cut inside the model: data, an index in the middle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
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


def forecast(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


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


cut(
    "states_written_through_data",
    "memory.data[:, t] = state",
    ("cell.weight_ih", "cell.weight_hh"),
    UnrolledIntoMemory,
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
