"""Which rows each rank sees, and what it draws for them."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


def table(rows: int = 32, width: int = 6, classes: int = 3) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(rows, width, generator=g), torch.randint(classes, (rows,), generator=g))


def classifier(ranks: int, width: int = 6, classes: int = 3):
    net = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, classes))
    model = DDP(net) if ranks > 1 else net
    return net, model, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def one_epoch(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@fault(
    "rows",
    "the rank is read from a variable that this launcher does not set, so that all ranks take shard 0",
    thread="huggingface/datasets#6990",
    check="distributed_equivalence",
    place='os.environ.get("SLURM_PROCID", 0)',
)
def rank_of_another_launcher(ranks=1):
    net, model, optimizer = classifier(ranks)
    dataset = table()
    sampler = DistributedSampler(
        dataset, num_replicas=ranks, rank=int(os.environ.get("SLURM_PROCID", 0)), shuffle=False
    )
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: one_epoch(model, optimizer, bs))


class Stream(IterableDataset):
    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for i in range(start, len(self.rows), step):
            yield self.rows[i]


@fault(
    "rows",
    "the stream is split over workers and not over ranks",
    thread="huggingface/datasets#3423",
    check="distributed_equivalence",
    place="start, step =",
)
def streamed(ranks=1):
    net, model, optimizer = classifier(ranks)
    loader = DataLoader(Stream(table(24)), batch_size=4)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: one_epoch(model, optimizer, bs))
