"""Parameters that get gradients and never move: rounded away in bfloat16, or left out by an optimizer of one's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair

# Float16 weights, batches as dicts, a warm-up that ends at a rate which float16 cannot hold.


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU())
        self.scale = nn.Parameter(torch.full((24,), 4.0))
        self.head = nn.Linear(24, 1)

    def forward(self, features):
        return self.head(self.body(features.to(self.head.weight.dtype)) * self.scale)


def scorer(half):
    def make():
        model = Scorer()
        if half:
            model = model.half()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, eps=1e-4)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
        x, y = data.table()

        def fit(batches):
            for batch in batches:
                loss = F.mse_loss(model(batch["features"]).float(), batch["score"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                warmup.step()

        return TrainLoop(model=model, optimizer=optimizer, batch={"features": x, "score": y}, fit=fit)

    return make


pair(
    "scale_in_float16",
    "every_param_moves",
    "lost_to_rounding",
    culprits=("scale",),
    faulty=scorer(half=True),
    fixed=scorer(half=False),
)
