"""Loops that save and load rightly, and look as if something were missing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def vectors(batches=8, rows=8, size=16, seed=21):
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(rows, size, generator=g) for _ in range(batches)]


@right(
    "checkpoints",
    "the noise of a step is seeded by the step's number, which is saved; no generator is",
    thread="vllm-project/speculators#1027",
)
def seeded_by_step():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.9)
    run = {"step": 0}

    def fit(batches):
        for x in batches:
            g = torch.Generator().manual_seed(1000 + run["step"])
            noisy = x + 0.3 * torch.randn(x.shape, generator=g)
            optimizer.zero_grad()
            F.mse_loss(model(noisy), x).backward()
            optimizer.step()
            run["step"] += 1

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run["step"] = state["step"]

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=vectors(),
        fit=fit,
        save=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": run["step"]},
        load=load,
    )
