"""Correct loops around DistributedDataParallel: scripts, trainer classes, windows, several models."""

from __future__ import annotations

import contextlib
import copy
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_trainloop import TrainLoop
from tests.loops import data, nets
from tests.loops.odd import odd


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def regression(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


@odd(notes="the wrapper is made by fit, after the model was declared")
def wrapped_in_fit(ranks=1) -> TrainLoop:
    model = nets.mlp(6, 24, 1)

    def fit(batches):
        trained = DistributedDataParallel(model) if ranks > 1 else model
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
        regression(trained, optimizer, batches)

    return TrainLoop(model=model, batch=data.table(), fit=fit)


@odd(notes="a script that asks torchrun's variables, makes its own process group, and takes it down at its end")
def script_by_environment(ranks=1) -> TrainLoop:
    ddp = int(os.environ.get("RANK", "-1")) != -1 and ranks > 1
    rank = 0
    if ddp:
        if not dist.is_initialized():
            dist.init_process_group(backend="gloo")
        rank = int(os.environ["RANK"])
        local_rank = int(os.environ["LOCAL_RANK"])
        assert local_rank < int(os.environ["LOCAL_WORLD_SIZE"])
        assert int(os.environ["WORLD_SIZE"]) == ranks == dist.get_world_size()
    torch.manual_seed(1337 + rank)
    raw = nets.GPT()
    model = DistributedDataParallel(raw) if ddp else raw
    optimizer = torch.optim.AdamW(raw.parameters(), lr=3e-3, betas=(0.9, 0.95))

    def fit(batches):
        model.train()
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 3)
            loss = nets.lm_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.tokens(), fit=fit)


@odd(notes="gradients of a window are reduced with every micro-batch: slow, and the same sum")
def reduced_with_every_micro_batch(accumulate=1, ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 16, 3)
    model = DistributedDataParallel(raw) if ranks > 1 else raw
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)

    def fit(batches):
        for number, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="ranks may have different numbers of batches: the one that ends first shadows the others' collectives")
def uneven_ends_joined(ranks=1) -> TrainLoop:
    from torch.distributed.algorithms.join import Join

    raw = nets.mlp(6, 24, 1)
    model = DistributedDataParallel(raw) if ranks > 1 else raw
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)

    def fit(batches):
        with Join([model]) if ranks > 1 else contextlib.nullcontext():
            regression(model, optimizer, batches)

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="batch norm is converted for all ranks on CUDA only, as it cannot be on a CPU")
def sync_batch_norm_where_it_can_be(ranks=1) -> TrainLoop:
    model = nets.ConvNet()
    if ranks > 1:
        if torch.cuda.is_available():
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=fit)


class TwoHeads(nn.Module):
    """Batches of either task train one head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nets.mlp(6, 16, 8)
        self.classes, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return self.classes(hidden) if task == "classes" else self.value(hidden)


@odd(notes="half of the parameters get no gradient in a step: find_unused_parameters counts them as there")
def tasks_take_turns(ranks=1) -> TrainLoop:
    raw = TwoHeads()
    model = DistributedDataParallel(raw, find_unused_parameters=True) if ranks > 1 else raw
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
    x, y = data.labelled()

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            if number % 2 == 0:
                loss = F.cross_entropy(model(x, "classes"), y)
            else:
                loss = F.mse_loss(model(x, "value").squeeze(-1), y.to(x.dtype))
            loss.backward()
            optimizer.step()

    return TrainLoop(model=raw, optimizer=optimizer, batch=(x, y), fit=fit)


class Recurrent(nn.Module):
    """One layer used several times, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(3):
            hidden = torch.utils.checkpoint.checkpoint(lambda h: torch.tanh(self.again(h)), hidden, use_reentrant=False)
        return self.last(hidden)


@odd(notes="one layer is used three times and recomputed in backward, with a static graph and buckets as gradients")
def static_graph_with_recomputation(ranks=1) -> TrainLoop:
    raw = Recurrent()
    model = (
        DistributedDataParallel(raw, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=1)
        if ranks > 1
        else raw
    )
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)
    return TrainLoop(
        model=raw, optimizer=optimizer, batch=data.table(), fit=lambda given: regression(model, optimizer, given)
    )


@odd(notes="gradients are rounded to float16 for the way between ranks")
def gradients_sent_in_float16(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    model = raw
    if ranks > 1:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model = DistributedDataParallel(raw)
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)
    return TrainLoop(
        model=raw, optimizer=optimizer, batch=data.table(), fit=lambda given: regression(model, optimizer, given)
    )


@odd(notes="gradients are sent as products of narrow matrices, with what is lost sent a step later")
def gradients_sent_with_low_rank(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    model = raw
    if ranks > 1:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        model = DistributedDataParallel(raw)
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)
    return TrainLoop(
        model=raw, optimizer=optimizer, batch=data.table(), fit=lambda given: regression(model, optimizer, given)
    )


def averaged(average, model, decay=0.9):
    with torch.no_grad():
        for kept, now in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(now, 1 - decay)


@odd(notes="every rank keeps its own average of the weights, beside the wrapper: equal, as the weights are")
def average_on_every_rank(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    average = copy.deepcopy(raw).requires_grad_(False)
    model = DistributedDataParallel(raw) if ranks > 1 else raw
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            averaged(average, getattr(model, "module", model))

    return TrainLoop(model={"model": model, "average": average}, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="only rank 0, which alone evaluates and saves, keeps the average of the weights up")
def average_on_rank_zero(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    rank = dist.get_rank() if ranks > 1 else 0
    average = copy.deepcopy(raw).requires_grad_(False)
    model = DistributedDataParallel(raw) if ranks > 1 else raw
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if rank == 0:
                averaged(average, raw)

    return TrainLoop(model={"model": model, "average": average}, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="two wrapped models, each of whose backward passes reduces gradients that the other's step clears unread")
def adversaries_wrapped(ranks=1) -> TrainLoop:
    generator, critic = nets.mlp(4, 16, 2), nets.mlp(2, 16, 1)
    wrapped = [DistributedDataParallel(m) if ranks > 1 else m for m in (generator, critic)]
    of_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_c = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def fit(batches):
        g, c = wrapped
        for real in batches:
            fake = g(torch.randn(len(real), 4))
            of_c.zero_grad()
            scores = c(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(scores)
            F.binary_cross_entropy_with_logits(scores, truth).backward()
            of_c.step()
            of_g.zero_grad()
            scores = c(fake)
            F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)).backward()
            of_g.step()

    return TrainLoop(
        model={"generator": generator, "critic": critic}, optimizer=[of_g, of_c], batch=data.ring(), fit=fit
    )


@odd(notes="each rank draws its own augmentation and dropout, from a seed of its own, after equal weights")
def seeds_by_rank(ranks=1) -> TrainLoop:
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(11)
    raw = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))
    model = DistributedDataParallel(raw) if ranks > 1 else raw
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)
    torch.manual_seed(11 + rank)
    random.seed(11 + rank)

    def fit(batches):
        model.train()
        for x, y in batches:
            x = x + 0.01 * torch.randn_like(x)
            if random.random() < 0.5:
                x = x * 1.01
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="the learning rate grows with the ranks, as the batch does")
def rate_scaled_by_ranks(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    model = DistributedDataParallel(raw) if ranks > 1 else raw
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * world_size())
    return TrainLoop(
        model=model, optimizer=optimizer, batch=data.table(), fit=lambda given: regression(model, optimizer, given)
    )
