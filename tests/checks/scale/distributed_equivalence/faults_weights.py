"""Gradients that ranks weigh wrongly: over micro-batches, tokens, clips and what is gathered."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_trainloop import TrainLoop
from tests.checks.scale.distributed_equivalence.faults_gradients import (
    Regressor,
    averaged,
    broadcast_gradients,
    regressing,
    summed,
    wrapped,
)
from tests.checks.scale.distributed_equivalence.unusual_sharded import (
    by_the_norm_of_a_rank,
    by_the_norm_of_all_ranks,
    hidden_units,
)
from tests.loops import data
from tests.loops.pairs import pair

# micro-batches


def accumulated(skips):
    """``skips(i, accumulate)``: whether the ith micro-batch is not synchronised."""

    def make(accumulate=1, ranks=1):
        model = wrapped(Regressor(), ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for i, (x, y) in enumerate(batches):
                alone = model.no_sync() if ranks > 1 and skips(i, accumulate) else contextlib.nullcontext()
                with alone:
                    (F.mse_loss(model(x), y) / accumulate).backward()
                if (i + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


def all_but_the_last(i, accumulate):
    return (i + 1) % accumulate != 0


pair(
    "no_sync_turned_round",
    "distributed_equivalence",
    "last_micro_batch_not_synchronised",
    faulty=accumulated(lambda i, accumulate: accumulate > 1 and not all_but_the_last(i, accumulate)),
    fixed=accumulated(all_but_the_last),
    where="backward()",
    quick=True,
)
pair(
    "no_sync_forgotten",
    "distributed_equivalence",
    "synchronised_every_micro_batch",
    faulty=accumulated(lambda _i, _accumulate: False),
    fixed=accumulated(all_but_the_last),
    level="advice",
    quick=True,
)


# what a rank weighs


def over_tokens(of_all_ranks):
    """Next tokens of texts of unequal lengths; labels of -100 do not count."""

    def make(ranks=1):
        model = wrapped(nn.Sequential(nn.Embedding(16, 12), nn.Tanh(), nn.Linear(12, 16)), ranks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids, targets = data.tokens(rows=4)
        for row, length in enumerate((3, 5, 9, 12)):
            targets[row, length:] = -100

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                logits = model(batch["input_ids"]).flatten(0, 1)
                labels = batch["labels"].flatten()
                if ranks > 1 and of_all_ranks:
                    tokens = (labels != -100).sum()
                    dist.all_reduce(tokens)
                    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") * ranks / tokens
                else:
                    loss = F.cross_entropy(logits, labels, ignore_index=-100)
                loss.backward()
                optimizer.step()

        batch = {"input_ids": ids, "labels": targets}
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "mean_over_ranks_of_token_means",
    "distributed_equivalence",
    "mean_of_means",
    faulty=over_tokens(of_all_ranks=False),
    fixed=over_tokens(of_all_ranks=True),
    quick=True,
)
pair(
    "gradients_summed_by_all_reduce",
    "distributed_equivalence",
    "summed_over_ranks",
    faulty=broadcast_gradients(summed),
    fixed=broadcast_gradients(averaged),
    quick=True,
)


def scaled_loss(factor):
    def make(ranks=1):
        model = wrapped(Regressor(), ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                (F.mse_loss(model(x), y) * factor(ranks)).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "loss_multiplied_by_the_ranks",
    "distributed_equivalence",
    "summed_over_ranks",
    faulty=scaled_loss(lambda ranks: ranks),
    fixed=scaled_loss(lambda ranks: 1),
)
pair(
    "loss_divided_before_the_wrapper_averages",
    "distributed_equivalence",
    "divided_twice",
    faulty=scaled_loss(lambda ranks: 1 / ranks),
    fixed=scaled_loss(lambda ranks: 1),
    quick=True,
)


def summed_loss(scaled):
    def make(ranks=1):
        model = wrapped(Regressor(), ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def fit(batches):
            for x, y in batches:
                loss = F.mse_loss(model(x), y, reduction="sum")
                optimizer.zero_grad()
                (loss * ranks if scaled else loss).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "sum_over_rows_averaged_over_ranks",
    "distributed_equivalence",
    "divided_twice",
    faulty=summed_loss(scaled=False),
    fixed=summed_loss(scaled=True),
    level="advice",
)


# norms


def clipped(when):
    def make(ranks=1):
        model = Regressor()
        if ranks > 1:
            for tensor in model.parameters():
                dist.broadcast(tensor.data, src=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def average():
            if ranks > 1:
                averaged([p.grad for p in model.parameters()])

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if when == "before":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                average()
                if when == "after":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "clipped_before_it_is_reduced",
    "distributed_equivalence",
    "norm_of_one_shard",
    faulty=clipped("before"),
    fixed=clipped("after"),
    quick=True,
)


def sharded_and_clipped(own):
    """Shards of fully_shard, clipped by torch's function, or by hand from what the rank holds."""

    def make(ranks=1):
        model = Regressor()
        if ranks > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def clip(limit):
            gradients = [p.grad.to_local() if ranks > 1 else p.grad for p in model.parameters()]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for gradient in gradients:
                gradient.mul_((limit / norm).clamp(max=1.0))

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if own:
                    clip(0.05)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


def unfrozen(late):
    """A body that was frozen when the model was wrapped."""

    def make(ranks=1):
        model = Regressor()
        model.body.requires_grad_(not late)
        called = wrapped(model, ranks)
        model.body.requires_grad_(True)
        return regressing(model, called)

    return make


pair(
    "shards_clipped_by_their_own_norm",
    "distributed_equivalence",
    "norm_of_one_shard",
    faulty=sharded_and_clipped(own=True),
    fixed=sharded_and_clipped(own=False),
)
pair(
    "body_unfrozen_after_wrapping",
    "distributed_equivalence",
    "parameters_not_in_wrapper",
    faulty=unfrozen(late=True),
    fixed=unfrozen(late=False),
    culprits=("body.0.weight",),
)


def shared_out(clip):
    return lambda ranks=1: hidden_units(ranks, clip)


def by_the_norm_of_a_group(model):
    """Copies and shards are optimizer groups, and each rank adds up the norms of its own."""
    groups = [nn.utils.get_total_norm([p.grad for p in group]) for group in (model.copies(), model.parts())]
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, torch.stack(groups).norm())


for name, clip in {"of_a_rank": by_the_norm_of_a_rank, "of_the_groups_of_a_rank": by_the_norm_of_a_group}.items():
    pair(
        f"copies_clipped_by_the_norm_{name}",
        "distributed_equivalence",
        "norm_of_one_shard",
        faulty=shared_out(clip),
        fixed=shared_out(by_the_norm_of_all_ranks),
        culprits=("scale", "bias"),
    )


# gathered features


def passages(differentiable):
    """Queries are scored against the passages of all ranks."""

    def make(ranks=1):
        raw = nn.ModuleList([nn.Linear(6, 8), nn.Linear(10, 8)])

        class Scores(nn.Module):
            def __init__(self):
                super().__init__()
                self.towers = raw

            def forward(self, query, passage):
                return self.towers[0](query), self.towers[1](passage)

        model = Scores()
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def gathered(features):
            if differentiable:
                from torch.distributed.nn.functional import all_gather

                return torch.cat(all_gather(features))
            every = [torch.empty_like(features) for _ in range(ranks)]
            dist.all_gather(every, features.detach().contiguous())
            every[dist.get_rank()] = features
            return torch.cat(every)

        def fit(batches):
            for left, right in batches:
                optimizer.zero_grad()
                query, passage = model(left, right)
                labels = torch.arange(len(query))
                if ranks > 1:
                    passage, labels = gathered(passage), labels + dist.get_rank() * len(query)
                F.cross_entropy(query @ passage.T, labels).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.views(), fit=fit, rows_interact=True)

    return make


pair(
    "passages_of_other_ranks_without_gradient",
    "distributed_equivalence",
    "gathered_without_gradient",
    faulty=passages(differentiable=False),
    fixed=passages(differentiable=True),
    quick=True,
)
