"""Checkpoints of several ranks, written once."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def build(ranks: int):
    net = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 2))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return net, model, optimizer, train


@right("checkpoints", "rank 0 writes, all wait and read", thread="neuraloperator/neuraloperator#324")
def main_writes(ranks=1):
    net, model, optimizer, train = build(ranks)

    def save(path):
        if ranks == 1 or dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        if ranks > 1:
            dist.barrier()

    def load(path):
        state = torch.load(path, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batch=(torch.randn(8, 6), torch.randn(8, 2)),
        fit=train,
        save=save,
        load=load,
    )


@right("checkpoints", "each rank writes a file of its own name", thread="karpathy/nanochat#336")
def a_file_each(ranks=1):
    net, _, optimizer, train = build(ranks)
    rank = dist.get_rank() if ranks > 1 else 0

    def save(path):
        path.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            torch.save(net.state_dict(), path / "model.pt")
        torch.save(optimizer.state_dict(), path / f"optimizer_{rank}.pt")
        if ranks > 1:
            dist.barrier()

    def load(path):
        net.load_state_dict(torch.load(path / "model.pt"))
        optimizer.load_state_dict(torch.load(path / f"optimizer_{rank}.pt"))

    return TrainLoop(
        model=net, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randn(8, 2)), fit=train, save=save, load=load
    )


@right(
    "checkpoints",
    "rank 0 reads, and what it read is broadcast to the others",
    thread="KempnerInstitute/KempnerForge#50",
)
def main_reads_and_tells(ranks=1):
    net, _, optimizer, train = build(ranks)
    main = ranks == 1 or dist.get_rank() == 0

    def save(path):
        if main:
            torch.save([net.state_dict(), optimizer.state_dict()], path)
        if ranks > 1:
            dist.barrier()

    def load(path):
        box = [torch.load(path)] if main else [None]
        if ranks > 1:
            dist.broadcast_object_list(box, src=0)
        net.load_state_dict(box[0][0])
        optimizer.load_state_dict(box[0][1])

    return TrainLoop(
        model=net, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randn(8, 2)), fit=train, save=save, load=load
    )
