"""Parameters, gradients or optimizer states that are cut over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, out: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model: Stack, ranks: int) -> Stack:
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train_epoch(model, optimizer, batches, clip=None):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            clip(model)
        optimizer.step()


def examples(rows: int = 8, width: int = 8, out: int = 4):
    return torch.randn(rows, width), torch.randint(out, (rows,))


@fault(
    "shards",
    "the optimizer is built before fully_shard and holds the parameters that were there then",
    thread="huggingface/accelerate#3394",
    check="distributed_equivalence",
    place="model = parallelize(model, ranks)",
)
def optimizer_first(ranks=1):
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = parallelize(model, ranks)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=examples(), fit=lambda bs: train_epoch(model, optimizer, bs)
    )


def clip_local(model: nn.Module, max_norm: float = 0.1) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
    total = torch.stack([g.norm() for g in local]).norm()
    for g in local:
        g.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))


@fault(
    "shards",
    "each rank clips by the norm of its own shards",
    thread="pytorch/pytorch#72548",
    check="distributed_equivalence",
    place="total = torch.stack([g.norm() for g in local]).norm()",
)
def clipped_by_shard(ranks=1):
    model = parallelize(Stack(depth=1), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=examples(), fit=lambda bs: train_epoch(model, optimizer, bs, clip_local)
    )


class NormClipper:
    def __init__(self, max_norm: float, ranks: int) -> None:
        self.max_norm, self.ranks = max_norm, ranks

    def __call__(self, model: nn.Module) -> None:
        shards = [p.grad.to_local() if self.ranks > 1 else p.grad for p in model.parameters()]
        norm = torch.nn.utils.get_total_norm(shards)
        if self.ranks > 1:
            dist.all_reduce(norm)
        scale = self.max_norm / (norm + 1e-6)
        if scale < 1:
            torch._foreach_mul_(shards, scale)


@fault(
    "shards",
    "norms of the shards are added, not their squares",
    thread="ByteDance-Seed/VeOmni#184",
    check="distributed_equivalence",
    place="dist.all_reduce(norm)",
)
def sum_of_norms(ranks=1):
    model = parallelize(Stack(width=6, out=3), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    clipper = NormClipper(0.05, ranks)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=examples(8, 6, 3),
        fit=lambda bs: train_epoch(model, optimizer, bs, clipper),
    )


@fault(
    "shards",
    "ranks are seeded apart before fully_shard, which broadcasts nothing: the model is put together of two",
    thread="pytorch/torchtitan#1777",
    check="distributed_equivalence",
    place="torch.manual_seed(1 + rank)",
)
def sharded_of_two_models(ranks=1):
    rank = dist.get_rank() if ranks > 1 else 0
    batch = examples()
    torch.manual_seed(1 + rank)
    model = parallelize(Stack(), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: train_epoch(model, optimizer, bs))


class PartitionedAdam:
    """Each rank steps the parameters that it owns."""

    def __init__(self, params, lr: float, ranks: int) -> None:
        self.params = list(params)
        self.ranks = ranks
        self.rank = dist.get_rank() if ranks > 1 else 0
        self.optimizer = torch.optim.Adam([p for i, p in enumerate(self.params) if self.owner(i) == self.rank], lr=lr)

    def owner(self, index: int) -> int:
        return index % self.ranks

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        if self.ranks > 1:
            for p in self.params:
                dist.all_reduce(p.grad)
                p.grad /= self.ranks
        self.optimizer.step()


@fault(
    "shards",
    "each rank steps the parameters that it owns, and nobody is sent the new values",
    thread="lodestone-rock/RamTorch#13",
    check="distributed_equivalence",
    place="self.optimizer.step()",
)
def partitioned_states(ranks=1):
    model = Stack(width=6, depth=1)
    optimizer = PartitionedAdam(model.parameters(), lr=1e-2, ranks=ranks)
    return TrainLoop(
        model=model,
        optimizer=optimizer.optimizer,
        batch=examples(8, 6),
        fit=lambda bs: train_epoch(model, optimizer, bs),
    )


@fault(
    "shards",
    "rank 0 alone puts the full weights together for the checkpoint, which takes all ranks",
    thread="pytorch/pytorch#125177",
    check="distributed_equivalence",
    place="full_tensor()",
)
def full_state_on_main(ranks=1):
    model = parallelize(Stack(depth=1), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    main = ranks == 1 or dist.get_rank() == 0
    snapshots = []

    def snapshot():
        if main:
            snapshots.append({k: v.full_tensor() if ranks > 1 else v.clone() for k, v in model.state_dict().items()})

    def train(batches):
        for batch in batches:
            train_epoch(model, optimizer, [batch])
            snapshot()

    return TrainLoop(model=model, optimizer=optimizer, batch=examples(), fit=train)
