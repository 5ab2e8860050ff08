"""Rows that are cut as they should be."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def table(rows: int = 32, width: int = 5) -> TensorDataset:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(rows, width, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def regressor(ranks: int, width: int = 5):
    net = nn.Sequential(nn.Linear(width, 14), nn.Tanh(), nn.Linear(14, 1))
    model = DDP(net) if ranks > 1 else net
    return net, model, torch.optim.Adam(net.parameters(), lr=1e-2)


def epoch_of(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def me(ranks: int) -> int:
    return dist.get_rank() if ranks > 1 else 0


@right("rows", "DistributedSampler with set_epoch at each epoch", thread="kan-bayashi/ParallelWaveGAN#177")
def sampler_and_set_epoch(ranks=1, epochs=2):
    net, model, optimizer = regressor(ranks)
    dataset = table()
    sampler = DistributedSampler(dataset) if ranks > 1 else None
    loader = DataLoader(dataset, batch_size=16 // ranks, shuffle=sampler is None, sampler=sampler)

    def train(batches):
        for epoch in range(epochs):
            if sampler is not None:
                sampler.set_epoch(epoch)
            epoch_of(model, optimizer, batches)

    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


@right(
    "rows",
    "rows are cut by hand, every world-size-th from the rank on, without any sampler",
    thread="huggingface/datasets#5369",
)
def every_nth_row(ranks=1):
    net, model, optimizer = regressor(ranks)
    dataset = table()
    loader = DataLoader(Subset(dataset, range(me(ranks), len(dataset), ranks)), batch_size=16 // ranks)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: epoch_of(model, optimizer, bs))


class Sharded(IterableDataset):
    def __init__(self, rows: TensorDataset, rank: int, world: int) -> None:
        self.rows, self.rank, self.world = rows, rank, world

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        return itertools.islice(iter(self.rows), self.rank * workers + worker, None, self.world * workers)


@right("rows", "the stream is cut over ranks and workers", thread="huggingface/datasets#3423")
def stream_cut_by_rank(ranks=1):
    net, model, optimizer = regressor(ranks)
    loader = DataLoader(Sharded(table(), me(ranks), ranks), batch_size=16 // ranks)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: epoch_of(model, optimizer, bs))


class EpochSampler(Sampler):
    """One permutation for all ranks, drawn from seed and epoch; each takes its part of each batch."""

    def __init__(self, size: int, batch: int, rank: int, world: int) -> None:
        self.size, self.batch, self.rank, self.world = size, batch, rank, world
        self.epoch = 0

    def __len__(self) -> int:
        return self.size // self.batch

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(1000 + self.epoch)).tolist()
        self.epoch += 1
        share = self.batch // self.world
        for start in range(0, self.size - self.batch + 1, self.batch):
            block = order[start : start + self.batch]
            yield block[self.rank * share : (self.rank + 1) * share]


@right(
    "rows",
    "a batch sampler of the project's own counts epochs itself; set_epoch is not needed",
    thread="pytorch/pytorch#11324",
)
def own_batch_sampler(ranks=1):
    net, model, optimizer = regressor(ranks)
    dataset = table(48)
    loader = DataLoader(dataset, batch_sampler=EpochSampler(len(dataset), 16, me(ranks), ranks))

    def train(batches):
        for _ in range(2):
            epoch_of(model, optimizer, batches)

    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


@right(
    "rows",
    "the split is drawn from a seeded generator, so that it is one on all ranks although these are seeded apart",
    thread="facebookresearch/detr#297",
)
def seeded_split(ranks=1):
    torch.manual_seed(20 + me(ranks))
    net, model, optimizer = regressor(ranks)
    train_set, _ = random_split(table(40), [32, 8], generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train_set, num_replicas=ranks, rank=me(ranks), shuffle=False)
    loader = DataLoader(train_set, batch_sampler=BatchSampler(sampler, 16 // ranks, drop_last=True))
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: epoch_of(model, optimizer, bs))


@right(
    "rows",
    "noise is drawn by rank: other gradients than one process has, as it is meant to be",
    thread="facebookresearch/deit#150",
)
def noise_by_rank(ranks=1):
    net = nn.Sequential(nn.Linear(6, 20), nn.SiLU(), nn.Linear(20, 5))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1234 + me(ranks))

    def train(batches):
        for x in batches:
            noise = torch.randn(x.shape, generator=generator)
            t = torch.rand(len(x), 1, generator=generator)
            loss = F.mse_loss(model(torch.cat([x + t * noise, t], 1)), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.randn(8, 5), fit=train)


@right(
    "rows",
    "dropout after seeding by rank: masks differ by rank, as in one larger batch",
    thread="huggingface/pytorch-image-models#1519",
)
def dropout_by_rank(ranks=1):
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def train(batches):
        torch.manual_seed(99 + me(ranks))
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 8), torch.randint(4, (8,))), fit=train)
