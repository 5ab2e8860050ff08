"""Which rows each rank sees, and what it draws for them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


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
    "the loader is the same on all ranks: each row is trained on twice, and 'distributed' buys nothing",
    thread="huggingface/datasets#5360",
    check="distributed_equivalence",
    place="shuffle=True, generator=",
)
def whole_set_everywhere(ranks=1, seed=0):
    net, model, optimizer = classifier(ranks)
    loader = DataLoader(table(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(seed))
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: one_epoch(model, optimizer, bs))


@fault(
    "rows",
    "set_epoch is never called, so that each epoch has the order of the first",
    thread="huggingface/transformers#4398",
    check="distributed_equivalence",
    place="for _ in range(epochs)",
)
def same_order_each_epoch(ranks=1, epochs=2):
    net, model, optimizer = classifier(ranks)
    dataset = table()
    sampler = DistributedSampler(dataset) if ranks > 1 else None
    loader = DataLoader(dataset, batch_size=16 // ranks, sampler=sampler, shuffle=sampler is None, drop_last=True)

    def train(batches):
        for _ in range(epochs):
            one_epoch(model, optimizer, batches)

    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "rows",
    "the sampler is seeded by rank: the ranks' permutations differ, so that rows are shared and others left out",
    thread="LambdaLabsML/distributed-training-guide#40",
    check="distributed_equivalence",
    place="seed=seed + rank",
)
def sampler_seeded_apart(ranks=1, seed=10):
    net, model, optimizer = classifier(ranks)
    rank = dist.get_rank() if ranks > 1 else 0
    dataset = table(48)
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=True, seed=seed + rank)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    def train(batches):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            one_epoch(model, optimizer, batches)

    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


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


@fault(
    "rows",
    "the data set is cut by rank, and the sampler cuts it again: half of the rows are never seen",
    thread="bghira/SimpleTuner#2986",
    check="distributed_equivalence",
    place="sampler = DistributedSampler(shard",
)
def cut_twice(ranks=1):
    net, model, optimizer = classifier(ranks)
    dataset = table(32)
    rank = dist.get_rank() if ranks > 1 else 0
    shard = Subset(dataset, range(rank, len(dataset), ranks))
    sampler = DistributedSampler(shard, num_replicas=ranks, rank=rank, shuffle=False)
    loader = DataLoader(shard, batch_size=4, sampler=sampler)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: one_epoch(model, optimizer, bs))


@fault(
    "rows",
    "the split into training and validation is drawn apart on each rank, before the sampler cuts it",
    thread="NVlabs/stylegan2-ada-pytorch#127",
    check="distributed_equivalence",
    place="random_split(",
)
def split_drawn_apart(ranks=1, seed=5):
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(seed + rank)
    net, model, optimizer = classifier(ranks)
    train_set, _ = random_split(table(40), [24, 16])
    sampler = DistributedSampler(train_set, num_replicas=ranks, rank=rank, shuffle=False)
    loader = DataLoader(train_set, batch_size=4, sampler=sampler)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: one_epoch(model, optimizer, bs))


class Noised(Dataset):
    """Adds noise to each item, drawn by a generator of its own."""

    def __init__(self, rows: TensorDataset, seed: int) -> None:
        self.rows = rows
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        x, y = self.rows[index]
        return x + 0.3 * torch.randn(x.shape, generator=self.generator), y


@fault(
    "rows",
    "all ranks draw the same noise for their rows",
    thread="huggingface/transformers#37932",
    check="distributed_equivalence",
    place="Noised(table(), seed=1234)",
)
def same_augmentation(ranks=1):
    net, model, optimizer = classifier(ranks)
    dataset = Noised(table(), seed=1234)
    sampler = DistributedSampler(dataset, shuffle=False) if ranks > 1 else None
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: one_epoch(model, optimizer, bs))


@fault(
    "rows",
    "noise and time steps of flow matching come from one seed on all ranks: row i of each rank has the same ones",
    thread="Robbyant/lingbot-vla-v2#41",
    check="distributed_equivalence",
    place="manual_seed(seed)",
)
def flow_matching(ranks=1, seed=42):
    net = nn.Sequential(nn.Linear(7, 24), nn.SiLU(), nn.Linear(24, 6))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)

    def train(batches):
        for actions in batches:
            noise = torch.randn(actions.shape, generator=generator)
            time = torch.rand(len(actions), 1, generator=generator)
            x_t = time * noise + (1 - time) * actions
            v_t = model(torch.cat([x_t, time], 1))
            loss = F.mse_loss(v_t, noise - actions)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.randn(8, 6), fit=train)
