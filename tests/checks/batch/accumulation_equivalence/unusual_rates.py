"""Rates and momenta that the loop itself writes, counted in batches, while it accumulates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


def interpolated(count, end, first, last):
    """``np.interp(count, [0, end], [first, last])``."""
    return first + (last - first) * min(count, end) / end


def groups_of(model):
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return [{"params": biases}, {"params": weights, "weight_decay": 5e-4}]


@odd(notes="the warm-up of YOLO: rates and momenta are interpolated by the number of the batch, inside of windows too")
def rates_of_yolo(accumulate=1) -> TrainLoop:
    model = mlp(6, 24, 3)
    optimizer = torch.optim.SGD(groups_of(model), lr=0.05, momentum=0.9, nesterov=True)

    def fit(batches, warmup_batches=30):
        last_step = -1
        for ni, (x, y) in enumerate(batches):
            if ni <= warmup_batches:
                for j, group in enumerate(optimizer.param_groups):
                    group["lr"] = interpolated(ni, warmup_batches, 0.1 if j == 0 else 0.0, 0.05)
                    group["momentum"] = interpolated(ni, warmup_batches, 0.8, 0.9)
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if ni - last_step >= accumulate:
                optimizer.step()
                optimizer.zero_grad()
                last_step = ni

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="the rate is set by the number of examples seen, as language models count tokens")
def rates_by_examples_seen(accumulate=1) -> TrainLoop:
    model = mlp(6, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fit(batches, warmup_examples=640):
        seen = 0
        for i, (x, y) in enumerate(batches, start=1):
            seen += len(x)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, seen / warmup_examples)
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if i % accumulate == 0 or i == len(batches):
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)
