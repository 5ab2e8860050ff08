"""Graphs that see what changes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def regress(forward, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(forward(x), y).backward()
        optimizer.step()


class Counting(nn.Module):
    def __init__(self, warmup: int = 3) -> None:
        super().__init__()
        self.trunk, self.out = nn.Linear(6, 12), nn.Linear(12, 2)
        self.calls, self.warmup = 0, warmup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.out(torch.tanh(self.trunk(x))) * min(1.0, self.calls / self.warmup)


@right(
    "graphs",
    "a counter of the module is written and read in forward; it is guarded, and the graph is made anew",
    thread="Koratahiu/Advanced_Optimizers#6",
)
def counter_in_forward(compile=False):
    model = Counting()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 6), torch.randn(8, 2))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: regress(forward, optimizer, bs))


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.clear()
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.losses.append(x.square().mean())
        return x


@right(
    "graphs",
    "auxiliary losses are collected in a list of the module: the list is written after the graph has run",
    thread="pytorch/torchtitan#2061",
)
def list_of_losses(compile=False):
    model = Collecting()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for x in batches:
            loss = F.mse_loss(forward(x), x) + 0.01 * sum(model.losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(8, 8), fit=train)


@torch.library.custom_op("blind_scale_right::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@cubed.register_fake
def _(x):
    return torch.empty_like(x)


@right("graphs", "the part that cannot be traced is switched off for the compiler", thread="pytorch/pytorch#123979")
def part_left_out(compile=False):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8)

        @torch.compiler.disable
        def forward(self, ids):
            unique, where = torch.unique(ids, return_inverse=True)
            return self.embed(unique)[where]

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse, self.head = Sparse(), nn.Linear(8, 3)

        def forward(self, ids):
            rows = self.sparse(ids)
            return self.head(torch.tanh(rows))

    model = Tagger()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(batches):
        for ids, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(forward(ids).mean(1), y).backward()
            optimizer.step()

    batch = (torch.randint(20, (8, 5)), torch.randint(3, (8,)))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)
