"""A sequence model that is given what it said itself, in some of its steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import tokens


class Seq2Seq(nn.Module):
    """With teacher forcing by a coin per step; otherwise the model's own detached guess is fed back."""

    def __init__(self, vocabulary=12, width=10):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder, self.decoder = nn.GRU(width, width, batch_first=True), nn.GRUCell(width, width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, source, target, forcing=0.5):
        h = self.encoder(self.embed(source))[1][-1]
        token, logits = torch.zeros_like(target[:, 0]), []
        for t in range(target.size(1)):
            h = self.decoder(self.embed(token), h)
            logits.append(self.out(h))
            token = target[:, t] if torch.rand(()) < forcing else logits[-1].detach().argmax(1)
        return torch.stack(logits, 1)


def train_seq2seq(model, optimizer, batches):
    for source, target in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(source, target).flatten(0, 1), target.flatten()).backward()
        optimizer.step()


@odd(
    notes="argmax of a detached output is an input of the next step; "
    "the graph differs from batch to batch (scheduled sampling)"
)
def scheduled_sampling_seq2seq() -> TrainLoop:
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = tokens(5, 4, 12)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(ids, ids.flip(1)),
        fit=lambda batches: train_seq2seq(model, optimizer, batches),
    )
