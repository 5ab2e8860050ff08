"""What the loops of this folder share: a small classifier, its batches, and the plain loop over a compiled model.

They compile with ``aot_eager``, which captures and traces as inductor does and generates no code, since that takes
seconds; ``test_inductor.py`` has those that need it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data

CHECK = "compile_parity"
BACKEND = "aot_eager"


class Classifier(nn.Module):
    def __init__(self, features=6, width=8, classes=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, width), nn.GELU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encoder(x))


def batches():
    return [data.labelled(rows=8, seed=seed) for seed in range(4)]


def steps(called, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(called(x), y).backward()
        optimizer.step()


def plain(model, called=None, optimizer=None, **fields):
    """The plain loop over what is called in place of the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    called = model if called is None else called
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=batches(),
        fit=lambda batches: steps(called, optimizer, batches),
        **fields,
    )


def compiling(build):
    """A loop with the knob: ``build(model, compile)`` gives what is called in place of the model."""

    def make(compile=False):
        model = Classifier()
        return plain(model, build(model, compile))

    return make
