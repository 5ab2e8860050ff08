"""Gradients that ranks never exchange, exchange in part, or weigh wrongly."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


class Regressor(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x))


def wrapped(model, ranks, **options):
    return DistributedDataParallel(model, **options) if ranks > 1 else model


# never synchronised


class Trainer:
    """A trainer that knows of its ranks, and starts them from the same weights."""

    def __init__(self, ranks, *, averages):
        self.model = Regressor()
        self.ranks, self.averages = ranks, averages
        if ranks > 1:
            for tensor in self.model.parameters():
                dist.broadcast(tensor.data, src=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def average_gradients(self):
        if self.ranks > 1 and self.averages:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.ranks

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(batch["x"]), batch["y"])
            if self.ranks > 1:
                logged = loss.detach().clone()
                dist.all_reduce(logged)
            loss.backward()
            self.average_gradients()
            self.optimizer.step()


def trained(averages):
    def make(ranks=1):
        trainer = Trainer(ranks, averages=averages)
        x, y = data.table()
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch={"x": x, "y": y}, fit=trainer.fit)

    return make


pair(
    "only_the_logged_loss_is_reduced",
    "distributed_equivalence",
    "never_synchronised",
    faulty=trained(averages=False),
    fixed=trained(averages=True),
    where="self.optimizer.step()",
    quick=True,
)


def broadcast_gradients(reduce):
    def make(ranks=1):
        model = Regressor()
        if ranks > 1:
            for tensor in model.parameters():
                dist.broadcast(tensor.data, src=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad(set_to_none=True)
                F.mse_loss(model(x), y).backward()
                if ranks > 1:
                    reduce([p.grad for p in model.parameters()])
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


def from_rank_zero(gradients):
    for gradient in gradients:
        dist.broadcast(gradient, src=0)


def averaged(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def summed(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)


def reduced_to_rank_zero(gradients):
    for gradient in gradients:
        dist.reduce(gradient, dst=0)
        gradient /= dist.get_world_size()
        dist.broadcast(gradient, src=0)


pair(
    "gradients_of_rank_zero_for_all",
    "distributed_equivalence",
    "never_synchronised",
    faulty=broadcast_gradients(from_rank_zero),
    fixed=broadcast_gradients(reduced_to_rank_zero),
    mentions=("rank 0 alone",),
)


def outlives_no_sync(stays):
    """``no_sync`` entered once for the whole run."""

    def make(ranks=1):
        model = wrapped(Regressor(), ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            with model.no_sync() if ranks > 1 and stays else contextlib.nullcontext():
                for x, y in batches:
                    optimizer.zero_grad()
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "no_sync_is_never_left",
    "distributed_equivalence",
    "never_synchronised",
    faulty=outlives_no_sync(stays=True),
    fixed=outlives_no_sync(stays=False),
)


# the wrapper by-passed


def with_a_method(through_the_wrapper):
    """The loss is a method of the model, which the wrapper does not have."""

    class WithLoss(Regressor):
        def forward(self, x, y=None):
            predicted = super().forward(x)
            return predicted if y is None else F.mse_loss(predicted, y)

        def training_step(self, x, y):
            return F.mse_loss(super().forward(x), y)

    def make(ranks=1):
        model = wrapped(WithLoss(), ranks)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                inner = model.module if ranks > 1 else model
                loss = model(x, y) if through_the_wrapper else inner.training_step(x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "training_step_of_the_wrapped_module",
    "distributed_equivalence",
    "wrapper_bypassed",
    faulty=with_a_method(through_the_wrapper=False),
    fixed=with_a_method(through_the_wrapper=True),
    quick=True,
)


def kept_before(wraps):
    """A runner that wraps a name of its own, and trains the one it was given."""

    class Runner:
        def __init__(self, model, ranks):
            self.net = model
            self.ddp = wrapped(model, ranks)
            self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05)

        def run(self, batches):
            net = self.ddp if wraps else self.net
            for x, y in batches:
                self.optimizer.zero_grad()
                F.mse_loss(net(x), y).backward()
                self.optimizer.step()

    def make(ranks=1):
        model = Regressor()
        runner = Runner(model, ranks)
        return TrainLoop(model=model, optimizer=runner.optimizer, batch=data.table(), fit=runner.run)

    return make


pair(
    "the_unwrapped_name_is_trained",
    "distributed_equivalence",
    "wrapper_bypassed",
    faulty=kept_before(wraps=False),
    fixed=kept_before(wraps=True),
)


# parameters that the wrapper does not know


def with_a_new_head(late):
    """Fine-tuning with another head."""

    def make(ranks=1):
        torch.manual_seed(0)
        model = Regressor()
        if not late:
            model.head = nn.Linear(12, 1)
        model = wrapped(model, ranks)
        if late:
            inner = model.module if ranks > 1 else model
            inner.head = nn.Linear(12, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


def with_a_scale(inside):
    """A learned scale of the loss, beside the model."""

    def make(ranks=1):
        torch.manual_seed(0)
        model = wrapped(Regressor(), ranks)
        log_scale = nn.Parameter(torch.zeros(1))
        parts = nn.ParameterDict({"log_scale": log_scale})
        optimizer = torch.optim.SGD([*model.parameters(), log_scale], lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                error = (model(x) - y).square()
                (error * torch.exp(-log_scale) + log_scale).mean().backward()
                if ranks > 1 and inside:
                    dist.all_reduce(log_scale.grad)
                    log_scale.grad /= ranks
                optimizer.step()

        return TrainLoop(model={"net": model, "parts": parts}, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "head_replaced_after_wrapping",
    "distributed_equivalence",
    "parameters_not_in_wrapper",
    faulty=with_a_new_head(late=True),
    fixed=with_a_new_head(late=False),
    culprits=("head.weight", "head.bias"),
)
pair(
    "learned_scale_beside_the_wrapper",
    "distributed_equivalence",
    "parameters_not_in_wrapper",
    faulty=with_a_scale(inside=False),
    fixed=with_a_scale(inside=True),
    culprits=("parts.log_scale",),
    quick=True,
)


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
    mentions=("valid targets",),
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


def clipped_by_owner(whole):
    """Each rank steps half of the parameters, and sends them to the other."""

    def make(ranks=1):
        model = Regressor()
        rank = dist.get_rank() if ranks > 1 else 0
        if ranks > 1:
            for tensor in model.parameters():
                dist.broadcast(tensor.data, src=0)
        parameters = list(model.parameters())
        mine = [p for i, p in enumerate(parameters) if i % ranks == rank]
        optimizer = torch.optim.AdamW(mine, lr=1e-2)

        def fit(batches):
            for x, y in batches:
                model.zero_grad()
                F.mse_loss(model(x), y).backward()
                if ranks > 1:
                    averaged([p.grad for p in parameters])
                torch.nn.utils.clip_grad_norm_(parameters if whole else mine, 1.0)
                optimizer.step()
                if ranks > 1:
                    for i, parameter in enumerate(parameters):
                        dist.broadcast(parameter.data, src=i % ranks)

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
pair(
    "clipped_by_the_norm_of_the_own_part",
    "distributed_equivalence",
    "norm_of_one_shard",
    faulty=clipped_by_owner(whole=False),
    fixed=clipped_by_owner(whole=True),
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
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(called(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

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
