"""What the ranks of a watched script come to, in two forks that are one process group."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from pytest_trainloop.checks.scale.distributed_equivalence import script_ranks
from pytest_trainloop.checks.scale.distributed_equivalence.script_runs import ScriptRank, script_noted
from pytest_trainloop.recording.watch import Watch
from pytest_trainloop.runs.ranks.launch import launch


def mlp(*norm):
    return nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Linear(8, 1))


def dataset(rows=64):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x.sum(1, keepdim=True))


def fit(
    model, *, sampler=None, rows=64, size=8, synchronise=lambda step: None, before=lambda step: None, cut=slice(None)
):
    data = dataset(rows)
    sampler = sampler or DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = 0
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=size, sampler=sampler):
            before(optimizer)
            optimizer.zero_grad()
            F.mse_loss(model(x[cut]), y[cut]).backward()
            synchronise(step)
            optimizer.step()
            step += 1


def averaged(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def gradients(model):
    averaged(p.grad for p in model.parameters())


def in_common():
    return RandomSampler(dataset(), generator=torch.Generator().manual_seed(3))


# faults


def same_rows(rank):
    fit(DDP(mlp()), sampler=in_common())


def other_seeds(rank):
    torch.manual_seed(rank)
    model = mlp()
    fit(model, synchronise=lambda _: gradients(model))


def bypassed(rank):
    fit(DDP(mlp()).module)


def other_rate(rank):
    fit(DDP(mlp()), before=lambda optimizer: optimizer.param_groups[0].update(lr=0.05 + 0.01 * rank))


def clipped_first(rank):
    model = mlp()

    def synchronise(_):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gradients(model)

    fit(model, synchronise=synchronise)


def moved_in_one(rank):
    model = mlp()

    def synchronise(step):
        gradients(model)
        if step == 4 and rank:
            model[0].weight.data.mul_(0.9)

    fit(model, synchronise=synchronise)


# what may be meant


def never(rank):
    fit(mlp())


def expert(rank):
    model = mlp()
    fit(model, synchronise=lambda _: gradients(model[0]))


def own_statistics(rank):
    fit(DDP(mlp(nn.BatchNorm1d(8)), broadcast_buffers=False))


# right


def wrapped(rank):
    fit(DDP(mlp()))


def sent_statistics(rank):
    fit(DDP(mlp(nn.BatchNorm1d(8))))


def by_hand(rank):
    model = mlp()

    def synchronise(_):
        gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    fit(model, synchronise=synchronise)


def local_sgd(rank):
    model = mlp()
    fit(model, synchronise=lambda step: averaged(p.data for p in model.parameters()) if step % 4 == 3 else None)


def without_sync(rank):
    model = DDP(mlp())
    with model.no_sync():
        fit(model)


def own_models(rank):
    torch.manual_seed(rank)
    fit(mlp())


def fewer_rows_than_ranks(rank):
    fit(DDP(mlp()), rows=1, size=1)


def own_part_of_a_common_batch(rank):
    fit(DDP(mlp()), sampler=in_common(), cut=slice(rank, None, 2))


def one_batch_for_a_benchmark(rank):
    fit(DDP(mlp()), rows=8, sampler=range(8))


def joined(rank):
    model = DDP(mlp())
    with Join([model]):
        fit(model, rows=64 - 24 * rank, sampler=range(64 - 24 * rank))


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        averaged([g := g.clone()])
        return g * 2


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Columns(nn.Module):
    """A layer whose columns are shared out, behind a norm that all ranks hold."""

    def __init__(self, rank):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        torch.manual_seed(rank)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return Summed.apply(self.down(torch.tanh(self.up(Copied.apply(self.norm(x))))))


def tensor_parallel(rank):
    fit(Columns(rank), sampler=in_common())


FOUND = {
    same_rows: ("same_rows_on_every_rank", "fault"),
    other_seeds: ("start_differs", "fault"),
    bypassed: ("wrapper_bypassed", "fault"),
    other_rate: ("weights_drift", "fault"),
    clipped_first: ("norm_of_one_shard", "fault"),
    moved_in_one: ("weights_drift", "fault"),
    never: ("never_synchronised", "advice"),
    expert: ("parameters_not_in_wrapper", "advice"),
    own_statistics: ("batch_norm_per_rank", "advice"),
}

RIGHT = (
    *(wrapped, sent_statistics, by_hand, local_sgd, without_sync, own_models, fewer_rows_than_ranks),
    *(own_part_of_a_common_batch, one_batch_for_a_benchmark, joined, tensor_parallel),
)


def findings_of(script, *, stopped=True):
    def work(rank):
        result = ScriptRank(stopped=stopped)
        watch = Watch()
        torch.manual_seed(0)
        with watch, contextlib.ExitStack() as stack:
            stack.enter_context(script_noted(watch, result, 2))
            script(rank)
        result.record = watch.record
        return result

    launched = launch(work, 2, timeout=120)
    assert launched.raised is None, launched.raised
    return list(script_ranks.of_script(launched))


@pytest.mark.parametrize("script", FOUND, ids=lambda script: script.__name__)
def test_what_is_found(script):
    (finding,) = findings_of(script)
    assert (finding.cause, finding.level) == FOUND[script]
    assert finding.measured.startswith("2 ranks of the script, ")


@pytest.mark.parametrize("script", RIGHT, ids=lambda script: script.__name__)
def test_what_is_right(script):
    assert findings_of(script) == []


def test_ranks_of_a_script_that_could_not_average_weights_are_at_fault(monkeypatch):
    monkeypatch.setattr(script_ranks, "BRINGS_TOGETHER", ())
    (finding,) = findings_of(never)
    assert finding.level == "fault"
    assert finding.summary.startswith("each of 2 ranks trains on the gradient of its own rows alone: nothing brings")
