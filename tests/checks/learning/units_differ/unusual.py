"""Units that begin with equal weights, and part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.learning.units_differ.faults import loop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


@odd(notes="the head begins at zero: its rows are equal, and get a gradient for each class")
def head_from_zero():
    def prepare(model):
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)

    return loop(prepare)()


@odd(notes="the hidden layer begins at one number, and the head behind it is drawn: its columns tell the units apart")
def constant_layer_before_a_drawn_head():
    def prepare(model):
        nn.init.constant_(model[0].weight, 0.1)
        nn.init.zeros_(model[0].bias)

    return loop(prepare)()


@odd(notes="sub-pixel convolution by ICNR: groups of four output channels begin equal, and get other pixels")
def icnr():
    class Upscaler(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.up = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
            self.out = nn.Conv2d(4, 1, 3, padding=1)
            with torch.no_grad():
                self.up.weight.copy_(self.up.weight[::4].repeat_interleave(4, dim=0))
                nn.init.zeros_(self.up.bias)

        def forward(self, x):
            return self.out(F.pixel_shuffle(self.up(torch.tanh(self.body(x))), 2))

    model = Upscaler()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for large, _ in batches:
            optimizer.zero_grad()
            F.mse_loss(model(F.avg_pool2d(large, 2)), large).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=fit)


@odd(notes="quantiles from a head at zero, far below the targets: gradients differ by a factor, steps of Adam do not")
def quantiles_of_far_targets():
    model = mlp(6, 16, 3)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            error = y + 10 - model(x)
            torch.maximum(quantiles * error, (quantiles - 1) * error).mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)
