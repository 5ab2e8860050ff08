"""Tiny loops whose wiring is in plain sight: a body, something between, a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.runs.evidence import Evidence

BODY = ["body.weight", "body.bias"]
HEAD = ["head.weight", "head.bias"]


class Net(nn.Module):
    def __init__(self, between, bias):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self._between = between
        nn.init.constant_(self.body.bias, bias)

    def forward(self, x):
        return self.head(self._between(self.body(x)))


def evidence(between=torch.tanh, *, bias=0.0, loss=F.mse_loss, after=lambda loss: loss, step=True) -> Evidence:
    """The evidence on a loop over this net, its run already made; ``after`` comes between loss and backward."""

    def make():
        model = Net(between, bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                after(loss(model(x), y)).backward()
                if step:
                    optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(6, 3), torch.randn(6, 1)), fit=fit)

    made = Evidence(make)
    made.run()
    return made
