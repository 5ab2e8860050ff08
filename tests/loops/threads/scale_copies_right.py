"""Compiled models whose names, copies and steps are those of the eager ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def images(rows: int = 8, classes: int = 4):
    return torch.randn(rows, 9), torch.randint(classes, (rows,))


@right("copies", "the optimizer's step is compiled, with a rate that is a tensor", thread="meta-pytorch/torchtune#2516")
def compiled_optimizer(compile=False):
    model = nn.Linear(9, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False)
    step = torch.compile(optimizer.step, backend="aot_eager") if compile else optimizer.step

    def train(batches):
        for i, (x, y) in enumerate(batches, 1):
            optimizer.param_groups[0]["lr"].fill_(0.01 / i)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)
