"""Ranks that begin unlike, get the same rows, or draw the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


def network():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def begin_alike(model):
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)


def average(model, ranks):
    for parameter in model.parameters() if ranks > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


def plain_fit(model, optimizer, ranks, after=lambda step: None):
    def fit(batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            average(model, ranks)
            optimizer.step()
            after(step)

    return fit


# the start


def seeded_by_rank(broadcasts):
    """Ranks seeded apart for their augmentation, before the model is built."""

    def make(ranks=1):
        torch.manual_seed(17 + (dist.get_rank() if ranks > 1 else 0))
        model = network()
        if ranks > 1 and broadcasts:
            begin_alike(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=plain_fit(model, optimizer, ranks))

    return make


pair(
    "built_under_the_seed_of_each_rank",
    "distributed_equivalence",
    "start_differs",
    faulty=seeded_by_rank(broadcasts=False),
    fixed=seeded_by_rank(broadcasts=True),
    culprits=("0.weight",),
    quick=True,
)


def loaded_on_rank_zero(broadcasts):
    """A checkpoint that rank 0 alone reads."""
    drawn = torch.Generator().manual_seed(1)
    kept = {k: 0.3 * torch.randn(v.shape, generator=drawn) for k, v in network().state_dict().items()}

    def make(ranks=1):
        torch.manual_seed(0)
        model = network()
        if ranks == 1 or dist.get_rank() == 0:
            model.load_state_dict(kept)
        if ranks > 1 and broadcasts:
            begin_alike(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=plain_fit(model, optimizer, ranks))

    return make


pair(
    "checkpoint_loaded_on_rank_zero",
    "distributed_equivalence",
    "start_differs",
    faulty=loaded_on_rank_zero(broadcasts=False),
    fixed=loaded_on_rank_zero(broadcasts=True),
)


# rows


def from_a_loader(sharded):
    def make(ranks=1):
        dataset = TensorDataset(*data.table(rows=64))
        shared = ranks > 1 and sharded
        sampler = DistributedSampler(dataset, shuffle=True) if shared else None
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, shuffle=sampler is None, generator=generator)
        model = network()
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), batches=loader, fit=fit)

    return make


pair(
    "loader_without_a_distributed_sampler",
    "distributed_equivalence",
    "same_rows_on_every_rank",
    faulty=from_a_loader(sharded=False),
    fixed=from_a_loader(sharded=True),
    quick=True,
)


def shared_by_a_sampler(one_seed):
    """A sampler that is given the seed of the rank's process."""

    def make(ranks=1):
        dataset = TensorDataset(*data.table(rows=32))
        rank = dist.get_rank() if ranks > 1 else 0
        sampler = DistributedSampler(dataset, ranks, rank, seed=3 if one_seed else 3 + rank)
        model = network()
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), batches=loader, fit=fit)

    return make


def half_of_a_half(cut_before):
    """Every rank reads files of its own, and the sampler shares these out once more."""

    def make(ranks=1):
        dataset = TensorDataset(*data.table(rows=64))
        rank = dist.get_rank() if ranks > 1 else 0
        if cut_before:
            dataset = Subset(dataset, range(rank, 64, ranks))
        sampler = DistributedSampler(dataset, ranks, rank, shuffle=False)
        model = network()
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), batches=loader, fit=fit)

    return make


pair(
    "sampler_with_the_seed_of_a_rank",
    "distributed_equivalence",
    "rows_left_out",
    faulty=shared_by_a_sampler(one_seed=False),
    fixed=shared_by_a_sampler(one_seed=True),
    quick=True,
)
pair(
    "cut_by_rank_and_by_the_sampler",
    "distributed_equivalence",
    "rows_left_out",
    faulty=half_of_a_half(cut_before=True),
    fixed=half_of_a_half(cut_before=False),
)


# draws


def denoised(by_rank):
    """A denoiser: fit seeds the noise, as a helper called set_seed does."""

    def make(ranks=1):
        model = network()
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            torch.manual_seed(7 + (dist.get_rank() if ranks > 1 and by_rank else 0))
            for x, y in batches:
                noise = torch.randn_like(x)
                optimizer.zero_grad()
                F.mse_loss(model(x + 0.1 * noise), y).backward()
                optimizer.step()

        def batches(n):
            rank = dist.get_rank() if ranks > 1 else 0
            return [data.table(seed=100 * rank + i) for i in range(n)]

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), batches=batches, fit=fit)

    return make


pair(
    "noise_under_one_seed_on_all_ranks",
    "distributed_equivalence",
    "same_draws_on_every_rank",
    faulty=denoised(by_rank=False),
    fixed=denoised(by_rank=True),
    level="advice",
    where="torch.randn_like(x)",
    quick=True,
)
