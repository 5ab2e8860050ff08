"""DistributedDataParallel around models, as it works."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


@right(
    "wrapping",
    "batch norm keeps statistics of each rank's rows, as DDP does everywhere; buffers are broadcast",
    thread="facebookresearch/moco#41",
)
def plain_batch_norm(ranks=1):
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    if ranks > 1:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def train(loader):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(16, 6), torch.randint(3, (16,))), fit=train)
