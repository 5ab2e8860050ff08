"""A classifier whose checkpoint holds model, optimizer and what is named."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp

WORDS = """the quick brown fox jumps over a lazy dog and then runs away from all those very strange animals which
live in this dark old forest near my little house by our river""".split()


def classifier(held, keys=(), *, prepare=lambda x: x, fit_of=None, evaluate=None, loaded=None, **data):
    """``held`` is what the loop keeps, of which ``keys`` are saved."""
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(prepare(x)), y).backward()
        optimizer.step()

    def fit(batches):
        model.train()
        for x, y in batches:
            step(x, y)

    def save():
        kept = {key: held[key] for key in keys}
        return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "held": kept})

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        held.update(state["held"])
        if loaded:
            loaded()

    def score():
        with torch.no_grad():
            return evaluate(model)

    fields = {"fit": fit_of(step) if fit_of else fit, **({"evaluate": score} if evaluate else {})}
    return TrainLoop(model=model, optimizer=optimizer, save=save, load=load, **fields, **data)
