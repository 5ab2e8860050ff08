"""Correct loops that keep ranks together by collectives of their own, without a wrapper."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data, nets
from tests.loops.odd import odd


def begin_alike(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def trained(reduce, ranks, optimizer=None):
    """A regression whose gradients go through ``reduce(model)`` before each step."""
    model = nets.mlp(6, 24, 1)
    if ranks > 1:
        begin_alike(model)
    made = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            made.zero_grad()
            F.mse_loss(model(x), y).backward()
            if ranks > 1:
                reduce(model)
            made.step()

    return TrainLoop(model=model, optimizer=made, batch=data.table(), fit=fit)


def each_parameter(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def gathered_and_averaged(model):
    for parameter in model.parameters():
        every = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.grad)
        parameter.grad = torch.stack(every).mean(0)


@odd(notes="gradients are gathered and averaged, and nothing is reduced")
def averaged_after_a_gather(ranks=1) -> TrainLoop:
    return trained(gathered_and_averaged, ranks)


@odd(notes="each parameter is reduced as soon as backward has made its gradient, by a hook")
def reduced_by_hooks(ranks=1) -> TrainLoop:
    model = nets.mlp(6, 24, 1)
    handles = []

    def begin(parameter):
        parameter.grad.div_(dist.get_world_size())
        handles.append(dist.all_reduce(parameter.grad, async_op=True))

    if ranks > 1:
        begin_alike(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(begin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            while handles:
                handles.pop().wait()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="gradients are summed over ranks, not averaged: the loss is divided by the rows of all of them")
def summed_over_ranks_of_a_mean_over_all_rows(ranks=1) -> TrainLoop:
    model = nets.mlp(6, 24, 1)
    if ranks > 1:
        begin_alike(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            rows = torch.tensor(float(len(x)))
            if ranks > 1:
                dist.all_reduce(rows)
            optimizer.zero_grad()
            (F.mse_loss(model(x), y, reduction="sum") / rows).backward()
            if ranks > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="rank 0 alone steps, on gradients reduced to it, and sends its weights to all")
def server_on_rank_zero(ranks=1) -> TrainLoop:
    model = nets.mlp(6, 24, 1)
    rank = dist.get_rank() if ranks > 1 else 0
    if ranks > 1:
        begin_alike(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if ranks > 1:
                for parameter in model.parameters():
                    dist.reduce(parameter.grad, dst=0)
                    parameter.grad /= ranks
            if rank == 0:
                optimizer.step()
            if ranks > 1:
                begin_alike(model)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


def average_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


@odd(notes="each rank steps on its own gradient; the mean of the weights is the step on the mean gradient, with SGD")
def weights_averaged_after_each_step(ranks=1) -> TrainLoop:
    model = nets.mlp(6, 24, 1)
    if ranks > 1:
        begin_alike(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if ranks > 1:
                average_weights(model)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="local SGD: ranks part on purpose for four steps, then their weights are averaged")
def weights_averaged_every_fourth_step(ranks=1) -> TrainLoop:
    model = nets.mlp(6, 24, 1)
    if ranks > 1:
        begin_alike(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for step, (x, y) in enumerate(batches, start=1):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if ranks > 1 and step % 4 == 0:
                average_weights(model)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


def wrapped_at_times(ranks, after_bare, before_step=lambda model: None):
    model = nets.mlp(6, 24, 1)
    called = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            bare = number % 2 == 1
            optimizer.zero_grad()
            F.mse_loss(model(x) if bare else called(x), y).backward()
            if bare and ranks > 1:
                before_step(model)
            optimizer.step()
            if bare and ranks > 1:
                after_bare(model)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="at every other step the bare model is called, and its gradients are reduced by hand")
def wrapper_and_reduction_by_hand_in_turn(ranks=1) -> TrainLoop:
    return wrapped_at_times(ranks, lambda model: None, each_parameter)


@odd(notes="at every other step the bare model is called, and the weights are averaged after it")
def wrapper_and_averaged_weights_in_turn(ranks=1) -> TrainLoop:
    return wrapped_at_times(ranks, average_weights)


@odd(notes="ranks gather tensors of different sizes, with room for just these: nccl takes them, and gloo refuses")
def sizes_gathered_before_their_tensors(ranks=1) -> TrainLoop:
    def gathered(model):
        each_parameter(model)
        chosen = torch.ones(2 + dist.get_rank())
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(ranks)]
        dist.all_gather(sizes, torch.tensor([len(chosen)]))
        dist.all_gather([torch.zeros(int(size)) for size in sizes], chosen)

    return trained(gathered, ranks)


def token_loss(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def ragged_texts():
    """Texts of 3 to 12 tokens: positions behind the end are not targets."""
    ids, targets = data.tokens(rows=8)
    lengths = torch.tensor([3, 12, 4, 11, 5, 10, 6, 9])
    return ids, targets.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -100)


@odd(notes="tokens of a whole window on all ranks are counted before its first micro-batch")
def mean_over_the_tokens_of_all_windows(accumulate=1, ranks=1) -> TrainLoop:
    raw = nets.GPT()
    model = nn.parallel.DistributedDataParallel(raw) if ranks > 1 else raw
    optimizer = torch.optim.AdamW(raw.parameters(), lr=3e-3)

    def step(window):
        tokens = sum((targets != -100).sum() for _, targets in window)
        if ranks > 1:
            dist.all_reduce(tokens)
        optimizer.zero_grad()
        for number, batch in enumerate(window, start=1):
            if ranks > 1:
                model.require_backward_grad_sync = number == len(window)
            (token_loss(model, batch) * ranks / tokens).backward()
        optimizer.step()

    def fit(batches):
        window = []
        for batch in batches:
            window.append(batch)
            if len(window) == accumulate:
                step(window)
                window = []

    return TrainLoop(model=raw, optimizer=optimizer, batch=ragged_texts(), fit=fit)


@odd(notes="a step is skipped on all ranks where one of them has a gradient that is not finite")
def ranks_agree_on_a_skipped_step(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    model = nn.parallel.DistributedDataParallel(raw) if ranks > 1 else raw
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            bad = (~loss.detach().isfinite()).float()
            loss.backward()
            if ranks > 1:
                dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if not bad:
                optimizer.step()

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)
