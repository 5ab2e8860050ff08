"""DistributedDataParallel around models that change, or that are called past it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


class Tagger(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 20), nn.ReLU())
        self.head = nn.Linear(20, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


@fault(
    "wrapping",
    "parameters are frozen after DDP was built; its reducer waits for their gradients and raises in the next step",
    thread="facebookresearch/ClassyVision#398",
    check="distributed_equivalence",
    place="requires_grad_(False)",
)
def freeze_trunk_for_transfer(ranks=1):
    model = Tagger(classes=3)
    net = model
    if ranks > 1:
        model = DDP(model)
    net.trunk.requires_grad_(False)
    optimizer = torch.optim.Adam(net.head.parameters(), lr=1e-2)

    def train_epoch(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    batch = (torch.randn(8, 10), torch.randint(3, (8,)))
    return TrainLoop(model=net, optimizer=optimizer, batch=batch, fit=train_epoch, frozen=("trunk.",))


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(9, 16)
        self.tasks = nn.ModuleDict({"depth": nn.Linear(16, 1), "normals": nn.Linear(16, 3)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.tasks[task](torch.relu(self.encoder(x)))


@fault(
    "wrapping",
    "each step trains one head; without find_unused_parameters DDP raises in the second step",
    thread="pytorch/pytorch#22049",
    check="distributed_equivalence",
    place="model = DDP(model)",
)
def alternating_tasks(ranks=1):
    model = MultiTask()
    if ranks > 1:
        model = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for i, batch in enumerate(batches):
            task = ("depth", "normals")[i % 2]
            loss = F.mse_loss(model(batch["image"], task), batch[task])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batch = {"image": torch.randn(8, 9), "depth": torch.randn(8, 1), "normals": torch.randn(8, 3)}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)
