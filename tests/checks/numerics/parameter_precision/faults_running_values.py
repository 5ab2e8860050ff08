"""Running averages that are held outside of modules' parameters, in a precision that takes no small updates."""

from __future__ import annotations

import torch
from torch import nn

from tests.loops import data
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop


def mlp():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


# Statistics of the inputs in a buffer that was cast with the model.


class Standardise(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.register_buffer("spread", torch.ones(width, dtype=dtype))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.spread.lerp_(x.var(0).to(self.spread.dtype), 1e-4)
        return x / self.spread.to(x.dtype).sqrt()


def standardised(dtype):
    def make():
        model = nn.Sequential(Standardise(6, dtype), mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return loop(model, data.labelled(), cross_entropy, optimizer)

    return make


pair(
    "statistics_of_inputs_in_bfloat16",
    "parameter_precision",
    "average_lost",
    culprits=("model.0.spread",),
    where="self.spread.lerp_(",
    faulty=standardised(torch.bfloat16),
    fixed=standardised(torch.float32),
)
