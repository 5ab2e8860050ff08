"""Correct loops whose ranks are set up in a way of their own: seeds, groups, loaders, parts of a model, optimizers."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops import data, nets
from tests.loops.odd import odd


def wrap(module, ranks, **options):
    return DistributedDataParallel(module, **options) if ranks > 1 else module


def trained(model, optimizer, batches, declared=None, **fields):
    def fit(given):
        for x, y in given:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=declared or model, optimizer=optimizer, fit=fit, **batches, **fields)


@odd(notes="every rank sets one seed before it builds and another one of its own after it")
def one_seed_to_build_and_many_to_train(ranks=1) -> TrainLoop:
    torch.manual_seed(0)
    np.random.seed(0)
    raw = nets.mlp(6, 24, 1)
    rank = int(os.environ.get("RANK", 0)) if ranks > 1 else 0
    torch.manual_seed(1000 + rank)
    np.random.seed(1000 + rank)
    model = wrap(raw, ranks)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            noise = torch.from_numpy(np.random.standard_normal(x.shape)).to(x)
            optimizer.zero_grad()
            F.mse_loss(model(x + 0.01 * noise), y).backward()
            optimizer.step()

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="ranks are built under different seeds, and rank 0 sends its weights to all by hand")
def weights_sent_by_rank_zero(ranks=1) -> TrainLoop:
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(rank)
    model = nets.mlp(6, 24, 1)
    if ranks > 1:
        state = [model.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(state, src=0)
        model.load_state_dict(state[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if ranks > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(ranks)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="the loss for the log is gathered as an object, and a group of its own carries it")
def log_in_a_group_of_its_own(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    model = wrap(raw, ranks)
    logs = dist.new_group(backend="gloo") if ranks > 1 else None
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
    history = []

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            every = [float(loss)]
            if ranks > 1:
                every = [None] * ranks
                dist.all_gather_object(every, float(loss), group=logs)
            history.append(sum(every) / len(every))

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


class Stream(IterableDataset):
    """An endless stream of which each rank takes every Nth row."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.x, self.y = data.table(rows=96)

    def __iter__(self):
        for index in range(self.rank, len(self.x), self.ranks):
            yield self.x[index], self.y[index]


@odd(notes="a stream without a sampler: the data set itself leaves out the rows of other ranks")
def stream_divided_by_the_data_set(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)
    loader = DataLoader(Stream(dist.get_rank() if ranks > 1 else 0, ranks), batch_size=8)
    return trained(wrap(raw, ranks), optimizer, {"batches": loader}, declared=raw)


@odd(notes="every rank shuffles all rows by a seed of its own: no share, and no two alike in expectation")
def each_rank_shuffles_all_rows_by_its_own_seed(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)
    order = torch.Generator().manual_seed(5 + (dist.get_rank() if ranks > 1 else 0))
    loader = DataLoader(TensorDataset(*data.table(rows=64)), batch_size=8, shuffle=True, generator=order)
    return trained(wrap(raw, ranks), optimizer, {"batches": loader}, declared=raw)


@odd(notes="a frozen encoder is left out of the wrapper: it has nothing to reduce")
def encoder_outside_the_wrapper(ranks=1) -> TrainLoop:
    encoder = nets.mlp(6, 16).requires_grad_(False).eval()
    raw = nets.mlp(16, 16, 1)
    head = wrap(raw, ranks)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            with torch.no_grad():
                hidden = encoder(x)
            optimizer.zero_grad()
            F.mse_loss(head(hidden), y).backward()
            optimizer.step()

    return TrainLoop(
        model={"encoder": encoder, "head": raw}, optimizer=optimizer, batch=data.table(), fit=fit, frozen=["encoder"]
    )


class WithLoss(nn.Module):
    """The loss is computed inside of what is wrapped, and takes learned weights of its terms."""

    def __init__(self):
        super().__init__()
        self.net = nets.mlp(6, 24, 1)
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, x, y):
        error = F.mse_loss(self.net(x), y)
        return {"loss": error * torch.exp(-self.log_variance) + self.log_variance, "error": error.detach()}


@odd(notes="two optimizers for one wrapped model, the second of which steps every other time")
def embedding_stepped_every_other_time(ranks=1) -> TrainLoop:
    raw = nets.GPT()
    model = wrap(raw, ranks)
    tables = [raw.token.weight, raw.position.weight]
    others = [p for p in raw.parameters() if all(p is not t for t in tables)]
    fast, slow = torch.optim.AdamW(others, lr=3e-3), torch.optim.SGD(tables, lr=0.1)

    def fit(batches):
        for number, batch in enumerate(batches, start=1):
            nets.lm_loss(model, batch).backward()
            fast.step()
            fast.zero_grad()
            if number % 2 == 0:
                for table in tables:
                    table.grad /= 2
                slow.step()
                slow.zero_grad()

    return TrainLoop(model=raw, optimizer=[fast, slow], batch=data.tokens(), fit=fit)


@odd(notes="gradients are clipped on each rank after they were reduced: the norm is the same on all")
def clipped_after_the_reduction(accumulate=1, ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 16, 3)
    model = wrap(raw, ranks)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)

    def fit(batches):
        for number, (x, y) in enumerate(batches, start=1):
            last = number % accumulate == 0
            with model.no_sync() if ranks > 1 and not last else contextlib.nullcontext():
                (F.cross_entropy(model(x), y) / accumulate).backward()
            if last:
                nn.utils.clip_grad_norm_(raw.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a statistic of the batch is averaged over ranks before the loss uses it, without a gradient")
def targets_standardised_over_all_ranks(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    model = wrap(raw, ranks)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            moments = torch.stack([y.mean(), y.square().mean()])
            if ranks > 1:
                dist.all_reduce(moments)
                moments /= ranks
            mean, spread = moments[0], (moments[1] - moments[0] ** 2).sqrt()
            optimizer.zero_grad()
            F.mse_loss(model(x), (y - mean) / spread).backward()
            optimizer.step()

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="ranks are simulated in one process: shares of the rows one after the other, and their mean gradient")
def simulated_ranks(ranks=1) -> TrainLoop:
    model = nets.mlp(6, 24, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(given):
        for x, y in given:
            optimizer.zero_grad()
            for rank in range(ranks):
                (F.mse_loss(model(x[rank::ranks]), y[rank::ranks]) / ranks).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)
