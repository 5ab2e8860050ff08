"""Correct loops in which rank 0 does more than the others, ranks read other data, or a group of one stands in."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops import data, nets
from tests.loops.odd import odd


def wrapped(ranks):
    raw = nets.mlp(6, 24, 1)
    model = DistributedDataParallel(raw) if ranks > 1 else raw
    return raw, model, torch.optim.AdamW(raw.parameters(), lr=1e-2)


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def score(model, x, y):
    model.eval()
    value = F.mse_loss(model(x), y)
    model.train()
    return value


@odd(notes="rank 0 evaluates without a barrier: the others run ahead, and wait for it in the next backward pass")
def rank_zero_evaluates_and_others_run_ahead(ranks=1) -> TrainLoop:
    raw, model, optimizer = wrapped(ranks)

    def fit(batches):
        for number, (x, y) in enumerate(batches, start=1):
            step(model, optimizer, x, y)
            if number % 2 == 0 and is_main():
                score(raw, x, y)

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="rank 0 alone writes checkpoints, and all ranks read the one file at the start")
def rank_zero_saves(ranks=1) -> TrainLoop:
    raw, model, optimizer = wrapped(ranks)

    def fit(batches):
        folder = [tempfile.mkdtemp() if is_main() else ""]
        if ranks > 1:
            dist.broadcast_object_list(folder, src=0)
        path = Path(folder[0], "last.pt")
        for number, (x, y) in enumerate(batches, start=1):
            step(model, optimizer, x, y)
            if number == 2:
                if is_main():
                    torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, path)
                if ranks > 1:
                    dist.barrier()
                torch.load(path, weights_only=True)

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="rank 0 decides when to stop and tells the others")
def rank_zero_stops_all(ranks=1) -> TrainLoop:
    raw, model, optimizer = wrapped(ranks)

    def fit(batches):
        best, patience = float("inf"), 3
        for x, y in batches:
            loss = step(model, optimizer, x, y)
            if is_main():
                patience = 3 if float(loss) < best else patience - 1
                best = min(best, float(loss))
            stop = torch.tensor([patience == 0], dtype=torch.uint8)
            if ranks > 1:
                dist.broadcast(stop, src=0)
            if stop.item():
                break

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="the loop reads its own data by a sampler of ranks, and takes of what it is given only the number of epochs")
def own_sampler_of_ranks(ranks=1) -> TrainLoop:
    raw, model, optimizer = wrapped(ranks)
    rows = TensorDataset(*data.table(rows=32))

    def fit(batches):
        rank = dist.get_rank() if ranks > 1 else 0
        sampler = DistributedSampler(rows, num_replicas=ranks, rank=rank, seed=3)
        loader = DataLoader(rows, batch_size=8, sampler=sampler)
        for epoch, _ in enumerate(batches):
            sampler.set_epoch(epoch)
            for x, y in loader:
                step(model, optimizer, x.to(next(raw.parameters()).dtype), y.to(next(raw.parameters()).dtype))

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="the batches are declared with a sampler of ranks: each rank draws another share of one order")
def batches_by_a_sampler_of_ranks(ranks=1) -> TrainLoop:
    raw, model, optimizer = wrapped(ranks)
    rows = TensorDataset(*data.table(rows=64))
    sampler = DistributedSampler(rows, num_replicas=ranks, rank=dist.get_rank() if ranks > 1 else 0)
    loader = DataLoader(rows, batch_size=8, sampler=sampler)

    def fit(batches):
        for x, y in batches:
            step(model, optimizer, x, y)

    return TrainLoop(model=raw, optimizer=optimizer, batches=loader, fit=fit)


@odd(notes="every rank is given the whole batch and takes its rows of it: no share of a share makes the whole")
def rows_taken_by_rank_in_fit(ranks=1) -> TrainLoop:
    raw, model, optimizer = wrapped(ranks)
    own = slice(dist.get_rank() if ranks > 1 else 0, None, ranks)

    def fit(batches):
        for x, y in batches:
            step(model, optimizer, x[own], y[own])

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="one process is a group of one, wrapped as well, and the group is taken down at the end of fit")
def group_of_one(ranks=1) -> TrainLoop:
    def begin():
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    raw = nets.mlp(6, 24, 1)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)

    def fit(batches):
        begin()
        model = DistributedDataParallel(raw)
        try:
            for x, y in batches:
                step(model, optimizer, x, y)
        finally:
            if ranks == 1:
                dist.destroy_process_group()

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)
