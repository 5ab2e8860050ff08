"""Ranks that wait for each other, write one file, or part in a later step."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_trainloop import TrainLoop
from tests.checks.scale.distributed_equivalence.faults_ranks import average, begin_alike, network, plain_fit
from tests.loops import data
from tests.loops.pairs import pair

# batch norm


def normalised(norm):
    def make(ranks=1):
        model = nn.Sequential(nn.Linear(6, 12), norm(12), nn.Tanh(), nn.Linear(12, 1))
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        def batches(n):
            rank = dist.get_rank() if ranks > 1 else 0
            return [data.table(seed=100 * rank + i) for i in range(n)]

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), batches=batches, fit=fit)

    return make


pair(
    "batch_norm_by_the_rows_of_a_rank",
    "distributed_equivalence",
    "batch_norm_per_rank",
    faulty=normalised(nn.BatchNorm1d),
    fixed=normalised(nn.LayerNorm),
    culprits=("1",),
    level="advice",
    quick=True,
)


# parameters without a gradient, and ranks that wait


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.first = nn.Linear(8, 1)
        self.second = nn.Linear(8, 1)

    def forward(self, x, head):
        return (self.first if head == 0 else self.second)(self.body(x).tanh())


def alternating(**options):
    def make(ranks=1):
        model = TwoHeads()
        if ranks > 1:
            model = DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for step, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                F.mse_loss(model(x, step % 2), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "one_head_a_step",
    "distributed_equivalence",
    "unused_parameters",
    faulty=alternating(),
    fixed=alternating(find_unused_parameters=True),
    culprits=("second.weight",),
    quick=True,
)


def evaluated(on_all):
    def make(ranks=1):
        model = network()
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rank = dist.get_rank() if ranks > 1 else 0
        x_held_out, y_held_out = data.table(seed=5)

        def evaluate():
            error = F.mse_loss(model(x_held_out), y_held_out).detach()
            if ranks > 1:
                dist.all_reduce(error)
            return error / ranks

        def fit(batches):
            for step, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                if step % 2 == 0 and (on_all or rank == 0):
                    with torch.no_grad():
                        evaluate()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "metric_reduced_on_rank_zero",
    "distributed_equivalence",
    "one_rank_waits",
    faulty=evaluated(on_all=False),
    fixed=evaluated(on_all=True),
    where="dist.all_reduce(error)",
    quick=True,
)


def gathered(select, padded):
    """What each rank selects of its outputs is gathered in tensors of one size, the rank's own."""

    def make(ranks=1):
        model = network()
        if ranks > 1:
            begin_alike(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def log(x):
            chosen = select(model(x).detach())
            if padded:
                chosen = F.pad(chosen, (0, len(x) - len(chosen)))
            every = [torch.zeros_like(chosen) for _ in range(ranks)]
            if ranks > 1:
                dist.all_gather(every, chosen)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                average(model, ranks)
                optimizer.step()
                log(x)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


def positive(out):
    return out[out > 0.1]


def one_more_by_rank(out):
    return out.flatten()[: 1 + (dist.get_rank() if dist.is_initialized() else 0)]


for name, select in {"positive_outputs_gathered": positive, "one_more_row_on_rank_one": one_more_by_rank}.items():
    pair(
        name,
        "distributed_equivalence",
        "one_rank_waits",
        faulty=gathered(select, padded=False),
        fixed=gathered(select, padded=True),
        where="dist.all_gather(every, chosen)",
        culprits=("all_gather",),
    )


# files


def checkpointed(by_rank_zero):
    def make(ranks=1):
        model = network()
        if ranks > 1:
            begin_alike(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        folder = Path(tempfile.gettempdir(), "pytest_trainloop_checkpoints")
        rank = dist.get_rank() if ranks > 1 else 0

        def save(step):
            if step == 1 and (rank == 0 or not by_rank_zero):
                folder.mkdir(exist_ok=True)
                torch.save(model.state_dict(), folder / "last.pt")

        return TrainLoop(
            model=model, optimizer=optimizer, batch=data.table(), fit=plain_fit(model, optimizer, ranks, save)
        )

    return make


pair(
    "checkpoint_written_by_every_rank",
    "distributed_equivalence",
    "written_by_every_rank",
    faulty=checkpointed(by_rank_zero=False),
    fixed=checkpointed(by_rank_zero=True),
    culprits=("last.pt",),
    where="torch.save(",
    quick=True,
)


# weights that part


def with_a_plateau(of_all):
    """The rate falls when the loss rises: by the loss of each rank."""

    def make(ranks=1):
        model = network()
        if ranks > 1:
            begin_alike(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        rank = dist.get_rank() if ranks > 1 else 0

        def fit(batches):
            for x, y in batches:
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                average(model, ranks)
                optimizer.step()
                seen = loss.detach().clone()
                if ranks > 1 and of_all:
                    dist.all_reduce(seen)
                schedule.step(seen / (ranks if of_all else 1))

        def batches(n):
            return [data.table(seed=10 * i + rank) for i in range(n)]

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), batches=batches, fit=fit)

    return make


def renormalised(on_all):
    def make(ranks=1):
        model = network()
        if ranks > 1:
            begin_alike(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rank = dist.get_rank() if ranks > 1 else 0

        def normalise(step):
            if on_all or rank == 0:
                with torch.no_grad():
                    model[2].weight.div_(model[2].weight.norm().clamp(min=0.5))

        return TrainLoop(
            model=model, optimizer=optimizer, batch=data.table(), fit=plain_fit(model, optimizer, ranks, normalise)
        )

    return make


pair(
    "rate_by_the_loss_of_each_rank",
    "distributed_equivalence",
    "weights_drift",
    faulty=with_a_plateau(of_all=False),
    fixed=with_a_plateau(of_all=True),
    where="schedule.step(",
    quick=True,
)
pair(
    "weights_normalised_on_rank_zero",
    "distributed_equivalence",
    "weights_drift",
    faulty=renormalised(on_all=False),
    fixed=renormalised(on_all=True),
)
