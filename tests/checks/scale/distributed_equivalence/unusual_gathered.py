"""Correct contrastive losses over the rows of all ranks, and others in which ranks need one another's outputs."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_trainloop import TrainLoop
from tests.loops import data, nets
from tests.loops.odd import odd


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nets.mlp(6, 24, 8), nets.mlp(10, 24, 8)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)


def contrastive(loss, ranks, **options):
    raw = Towers()
    model = DistributedDataParallel(raw, **options) if ranks > 1 else raw
    optimizer = torch.optim.AdamW(raw.parameters(), lr=3e-3)

    def fit(batches):
        for left, right in batches:
            optimizer.zero_grad()
            loss(*model(left, right)).backward()
            optimizer.step()

    return TrainLoop(model=raw, optimizer=optimizer, batch=data.views(), fit=fit)


@odd(notes="features of all ranks by a gather that autograd goes through; every rank computes the whole loss")
def contrast_by_a_differentiable_gather(ranks=1) -> TrainLoop:
    def loss(left, right):
        if ranks > 1:
            from torch.distributed.nn.functional import all_gather

            left, right = torch.cat(all_gather(left)), torch.cat(all_gather(right))
        return nets.contrast(left @ right.T)

    return contrastive(loss, ranks)


def with_own(features):
    """Those of all ranks, with gradients through the own only."""
    every = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(every, features.detach().contiguous())
    every[dist.get_rank()] = features
    return torch.cat(every)


@odd(notes="gathered features carry no gradient; the own are put back, and the gradient is 1/N of one process'")
def contrast_with_own_features_put_back(ranks=1) -> TrainLoop:
    def loss(left, right):
        if ranks > 1:
            left, right = with_own(left), with_own(right)
        return nets.contrast(left @ right.T)

    return contrastive(loss, ranks)


class Gather(torch.autograd.Function):
    """The gather of CLIP's and of SimCLR's many copies: backward sums the gradients of all ranks, and takes its own."""

    @staticmethod
    def forward(ctx, features):
        every = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(every, features.contiguous())
        return tuple(every)

    @staticmethod
    def backward(ctx, *gradients):
        every = torch.stack(gradients)
        dist.all_reduce(every)
        return every[dist.get_rank()]


@odd(notes="own rows against the columns of all ranks: each rank computes another part of the loss")
def contrast_of_own_rows(ranks=1) -> TrainLoop:
    def loss(left, right):
        if ranks == 1:
            return nets.contrast(left @ right.T)
        all_left, all_right = torch.cat(Gather.apply(left)), torch.cat(Gather.apply(right))
        labels = torch.arange(len(left)) + len(left) * dist.get_rank()
        rows = F.cross_entropy(left @ all_right.T / 0.2, labels)
        columns = F.cross_entropy(right @ all_left.T / 0.2, labels)
        return (rows + columns) / 2

    return contrastive(loss, ranks)


@odd(notes="own rows only, though a gather would give more: negatives of one rank, as in many a published run")
def contrast_on_each_rank(ranks=1) -> TrainLoop:
    return contrastive(lambda left, right: nets.contrast(left @ right.T), ranks)


@odd(notes="blocks of negatives go round the ranks, one exchange at a time, with a loss of pairs (SigLIP)")
def negatives_exchanged_between_neighbours(ranks=1) -> TrainLoop:
    def pairs(left, right, sign):
        return -F.logsigmoid(sign * (left @ right.T) * 5).sum()

    def loss(left, right):
        rows = len(left)
        total = pairs(left, right, 2 * torch.eye(rows) - 1)
        if ranks > 1:
            from torch.distributed.nn.functional import all_gather

            every = all_gather(right)
            for other in range(1, ranks):
                total = total + pairs(left, every[(dist.get_rank() + other) % ranks], -torch.ones(rows, rows))
        return total / rows

    return contrastive(loss, ranks)


@odd(notes="keys of all ranks go into every rank's queue, and no gradient with them (MoCo)")
def queue_of_the_keys_of_all_ranks(ranks=1) -> TrainLoop:
    query, key = nets.mlp(6, 24, 8), nets.mlp(10, 24, 8).requires_grad_(False)
    model = DistributedDataParallel(query) if ranks > 1 else query
    optimizer = torch.optim.SGD(query.parameters(), lr=0.05)

    def fit(batches):
        queue = F.normalize(torch.ones(16, 8) + torch.eye(16, 8), dim=-1)
        for left, right in batches:
            q = F.normalize(model(left), dim=-1)
            with torch.no_grad():
                k = F.normalize(key(right), dim=-1)
            positive = (q * k).sum(-1, keepdim=True)
            scores = torch.cat([positive, q @ queue.to(q).T], dim=1) / 0.2
            optimizer.zero_grad()
            F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long)).backward()
            optimizer.step()
            if ranks > 1:
                every = [torch.empty_like(k) for _ in range(ranks)]
                dist.all_gather(every, k)
                k = torch.cat(every)
            queue = torch.cat([k, queue.to(k)])[:16]

    return TrainLoop(model={"query": query, "key": key}, optimizer=optimizer, batch=data.views(), fit=fit)
