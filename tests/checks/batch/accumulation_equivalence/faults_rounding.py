"""Micro-batches that are weighed by a number of examples that was rounded down."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.pairs import pair

BATCH_SIZE = 32


def loop(weight):
    """A loop that weighs each micro-batch's loss by a function of the micro-batch and of the number of them."""

    def make(accumulate=1):
        model = mlp(6, 24, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def fit(batches):
            for number, (x, y) in enumerate(batches, start=1):
                loss = F.cross_entropy(model(x), y)
                (loss * weight(x, accumulate)).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        batch = torch.randn(BATCH_SIZE, 6), torch.arange(BATCH_SIZE) % 4
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


# The settings give the size of a whole batch, and that of a micro-batch is taken to be a k-th of it.
pair(
    "weighed_by_micro_batch_size_of_the_settings",
    "accumulation_equivalence",
    "count_rounded_down",
    level="advice",
    faulty=loop(lambda x, accumulate: (BATCH_SIZE // accumulate) / BATCH_SIZE),
    fixed=loop(lambda x, accumulate: 1 / accumulate),
    quick=True,
)
