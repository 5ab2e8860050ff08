"""Right loops about accumulation and about what lies between calls, that look odd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def points(n=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=generator)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def classifier():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))


@right(
    "accumulation",
    "the counter of micro-batches lives on between calls of fit: a window may begin in one call and end in the next",
    thread="wyim-pgl/transgenic#53",
)
def window_over_calls(grad_accum=2):
    torch.manual_seed(0)

    class Trainer:
        def __init__(self, model):
            self.model, self.micro_done = model, 0
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def run_epoch(self, batches):
            for x, y in batches:
                (F.cross_entropy(self.model(x), y) / grad_accum).backward()
                self.micro_done += 1
                if self.micro_done % grad_accum == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)

    trainer = Trainer(classifier())
    loader = DataLoader(points(40, seed=8), batch_size=8)
    return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batches=loader, fit=trainer.run_epoch)
