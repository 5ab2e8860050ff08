"""A layer whose gradient is lost in low precision, beside others that hide it in the whole gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.precision_parity.faults_autocast import autocast
from tests.loops import data
from tests.loops.pairs import pair


class SinceReference(nn.Module):
    """Days since a reference day, of a column that counts days since another one."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, days):
        days = days.to(self.dtype)
        return (days - 2000.0).to(torch.float32)


class WithCalendar(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.calendar = SinceReference(dtype)
        self.season = nn.Linear(4, 3)
        self.body = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x, days):
        return self.body(x) + 2e-3 * self.season(self.calendar(days))


def dated(dtype):
    def make(precision="bf16"):
        model = WithCalendar(dtype if precision == "bf16" else torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y = data.labelled()
        days = 2000.0 + torch.randint(-6, 7, (len(x), 4), generator=torch.Generator().manual_seed(1))

        def fit(batches):
            for b in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    scores = model(b["x"], b["days"])
                F.cross_entropy(scores.float(), b["y"]).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch={"x": x, "days": days, "y": y}, fit=fit)

    return make


pair(
    "small_layer_on_dates_in_bfloat16",
    "precision_parity",
    "cancellation",
    faulty=dated(torch.bfloat16),
    fixed=dated(torch.float32),
    culprits=("season.weight",),
    where="days - 2000.0",
)
