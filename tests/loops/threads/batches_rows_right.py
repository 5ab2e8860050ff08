"""Rows that meet on purpose, or that only seem to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import Padding, TrainLoop
from tests.loops.from_threads import right


def loader(*tensors, batch_size):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(*tensors), batch_size, shuffle=True, generator=generator, drop_last=True)


def encoder(inputs, outputs, hidden=24):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def fit_with(optimizer, step):
    def train(batches):
        for batch in batches:
            loss = step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


@right(
    "rows",
    "balanced MSE: predictions (n, 1) against targets (1, n) on purpose, the row's own target is the class",
    thread="jiawei-ren/BalancedMSE#19",
)
def balanced_mse():
    torch.manual_seed(0)
    model = encoder(6, 1)

    class BMCLoss(nn.Module):
        def __init__(self, sigma=1.0):
            super().__init__()
            self.noise_sigma = nn.Parameter(torch.tensor(sigma))

        def forward(self, pred, target):
            variance = self.noise_sigma**2
            logits = -0.5 * (pred - target.T).pow(2) / variance
            loss = F.cross_entropy(logits, torch.arange(len(pred)))
            return loss * (2 * variance).detach()

    criterion = BMCLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.add_param_group({"params": criterion.noise_sigma, "lr": 1e-2, "name": "noise_sigma"})
    data = loader(torch.randn(48, 6), torch.randn(48, 1).exp(), batch_size=12)
    return TrainLoop(
        model={"model": model, "criterion": criterion},
        optimizer=optimizer,
        batches=data,
        fit=fit_with(optimizer, lambda b: criterion(model(b[0]), b[1])),
    )


@right(
    "rows",
    "rows are sorted by length for packing and brought back by argsort of the order",
    thread="pytorch/pytorch#4927",
)
def sort_and_restore():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Embedding(25, 12, padding_idx=0), nn.GRU(12, 12, batch_first=True)
            self.out = nn.Linear(12, 3)

        def forward(self, ids, lengths):
            sorted_lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(self.embed(ids[order]), sorted_lengths, batch_first=True)
            return self.out(self.gru(packed)[1][-1][order.argsort()])

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @dataclass
    class Text:
        ids: torch.Tensor
        lengths: torch.Tensor
        label: torch.Tensor

    def draw(n=7):
        lengths = torch.randperm(9)[:n] + 1
        ids = torch.randint(1, 25, (n, int(lengths.max()))) * (torch.arange(int(lengths.max())) < lengths[:, None])
        return Text(ids, lengths, torch.randint(0, 3, (n,)))

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [draw() for _ in range(n)],
        fit=fit_with(optimizer, lambda t: F.cross_entropy(model(t.ids, t.lengths), t.label)),
        padding=Padding(pad_id=0),
    )
