"""Micro-batches whose gradients are reduced in time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


@right("accumulation", "every micro-batch is reduced: slower, and the same", thread="huggingface/accelerate#106")
def always_synced(ranks=1, accumulate=1):
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    model = DDP(net, static_graph=False, bucket_cap_mb=1) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def train(loader):
        for step, (x,) in enumerate(loader, 1):
            loss = F.mse_loss(model(x), x) / accumulate
            loss.backward()
            if step % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6),), fit=train)
