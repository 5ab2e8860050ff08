"""Shards that are put together as they should be."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def network(width: int = 8, out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


def examples(rows: int = 8, width: int = 8, out: int = 3):
    return torch.randn(rows, width), torch.randint(out, (rows,))


def sharded(model: nn.Sequential, ranks: int) -> nn.Sequential:
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


@right("shards", "fully_shard first, then the optimizer over the sharded parameters", thread="pytorch/pytorch#149205")
def shard_then_optimizer(ranks=1):
    model = sharded(network(), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=examples(), fit=train)


@right(
    "shards",
    "clip_grad_norm_ takes the norm of whole parameters; only the log needs full_tensor",
    thread="radixark/miles_diffusion#35",
)
def clip_sharded(ranks=1):
    model = sharded(network(6, 4), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append((norm.full_tensor() if ranks > 1 else norm).item())
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=examples(8, 6, 4), fit=train)


@right("shards", "squares of the shards' norms are summed over the ranks", thread="ByteDance-Seed/VeOmni#184")
def squares_are_summed(ranks=1):
    model = sharded(network(), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def clip(max_norm):
        grads = [p.grad.to_local() if ranks > 1 else p.grad for p in model.parameters()]
        square = torch.stack([g.square().sum() for g in grads]).sum()
        if ranks > 1:
            dist.all_reduce(square)
        scale = max_norm / (square.sqrt() + 1e-6)
        for g in grads:
            g.mul_(scale.clamp(max=1.0))

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip(0.05)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=examples(), fit=train)


@right("shards", "seeded apart, but weights are broadcast before they are cut", thread="pytorch/torchtitan#1777")
def broadcast_before_cutting(ranks=1):
    batch = examples()
    torch.manual_seed(40 + (dist.get_rank() if ranks > 1 else 0))
    model = network()
    if ranks > 1:
        for p in model.parameters():
            dist.broadcast(p.detach(), 0)
    sharded(model, ranks)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)


@right(
    "shards",
    "fully sharded with micro-batches: set_requires_gradient_sync is on for the last one",
    thread="pytorch/pytorch#114299",
)
def sharded_accumulation(ranks=1, micro=2):
    model = sharded(network(5, 5), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            for i, (a, b) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
                if ranks > 1:
                    model.set_requires_gradient_sync(i == micro - 1)
                (F.cross_entropy(model(a), b) / micro).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=examples(8, 5, 5), fit=train)


class OwnedSGD:
    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.params, self.ranks = list(model.parameters()), ranks
        self.rank = dist.get_rank() if ranks > 1 else 0
        self.inner = torch.optim.SGD(self.params[self.rank :: ranks], lr=0.1, momentum=0.9)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        for i, p in enumerate(self.params):
            if self.ranks > 1:
                dist.reduce(p.grad, dst=i % self.ranks)
                p.grad /= self.ranks
        self.inner.step()
        for i, p in enumerate(self.params):
            if self.ranks > 1:
                dist.broadcast(p.data, src=i % self.ranks)


@right(
    "shards",
    "gradients are reduced to the owner alone, who steps and sends the weights",
    thread="pytorch/pytorch#46750",
)
def owner_steps_and_sends(ranks=1):
    model = network()
    optimizer = OwnedSGD(model, ranks)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer.inner, batch=examples(), fit=train)


@right("shards", "ZeroRedundancyOptimizer under DDP", thread="LambdaLabsML/distributed-training-guide#44")
def zero_redundancy(ranks=1):
    net = network()
    model = DDP(net) if ranks > 1 else net
    if ranks > 1:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=examples(), fit=train)
