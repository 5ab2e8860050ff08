"""Undivided losses over batches that are no plain tensors: samples, packed sequences."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from pytest_trainloop import TrainLoop
from tests.loops.pairs import pair

LENGTHS = (5, 3, 4, 2, 6, 3)


def sequences():
    return [torch.randn(length, 4) for length in LENGTHS]


class OfSamples(nn.Module):
    """Reads a list of samples, which it puts together itself."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, samples):
        means = torch.stack([sample["frames"].mean(0) for sample in samples])
        labels = torch.tensor([sample["label"] for sample in samples], dtype=means.dtype)
        return F.mse_loss(self.body(means).squeeze(1), labels)


class OfPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8), nn.Linear(8, 1)

    def forward(self, packed, y):
        _, last = self.rnn(packed)
        return F.mse_loss(self.head(last[0]).squeeze(1), y)


def loop_of(model_class, batch, divided, accumulate=1):
    model = model_class()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for i, parts in enumerate(batches, start=1):
            loss = model(*parts)
            (loss / accumulate if divided else loss).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit)


def made(model_class, batch):
    def faulty(accumulate=1):
        return loop_of(model_class, batch, False, accumulate)

    def fixed(accumulate=1):
        return loop_of(model_class, batch, True, accumulate)

    return {"faulty": faulty, "fixed": fixed}


undivided = functools.partial(pair, check="accumulation_equivalence", cause="loss_not_divided", where="backward()")

undivided(
    "undivided_over_a_list_of_samples",
    **made(OfSamples, lambda: ([{"frames": x, "label": 0.3 * i} for i, x in enumerate(sequences())],)),
)
undivided(
    "undivided_over_packed_sequences",
    **made(OfPacked, lambda: (pack_sequence(sequences(), enforce_sorted=False), torch.rand(6))),
)
