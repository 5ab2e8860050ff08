"""Gradients that ranks never exchange, or exchange in part."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_trainloop import TrainLoop
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


def averaged(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def summed(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)


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


def partly_bare(is_bare, warm_up=0):
    """A loop that calls the wrapper at some steps, and the bare model at others."""

    def make(ranks=1):
        model = Regressor()
        called = wrapped(model, ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, step / warm_up) if warm_up else 1.0
        )

        def fit(batches):
            for step, (x, y) in enumerate(batches):
                net = model if is_bare(step) else called
                optimizer.zero_grad()
                F.mse_loss(net(x), y).backward()
                optimizer.step()
                scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "bare_at_every_other_step",
    "distributed_equivalence",
    "wrapper_bypassed",
    faulty=partly_bare(lambda step: step % 2 == 0, warm_up=3),
    fixed=partly_bare(lambda step: False, warm_up=3),
    where="net(x)",
)
pair(
    "bare_on_one_rank_in_turn",
    "distributed_equivalence",
    "one_rank_waits",
    faulty=partly_bare(lambda step: dist.is_initialized() and (step + dist.get_rank()) % 2 == 0),
    fixed=partly_bare(lambda step: False),
)


def regressing(model, called):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(called(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


def replaced(first):
    """Parameters are made again, as where a module is moved to another device and back."""

    def make(ranks=1):
        model = Regressor()
        called = model if first else wrapped(model, ranks)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
        called = wrapped(model, ranks) if first else called
        return regressing(model, called)

    return make


pair(  # https://github.com/pytorch/pytorch/issues/104336
    "parameters_replaced_after_wrapping",
    "distributed_equivalence",
    "parameters_not_in_wrapper",
    faulty=replaced(first=False),
    fixed=replaced(first=True),
    culprits=("body.0.weight", "head.weight"),
)


# parameters that the wrapper does not know


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
    "learned_scale_beside_the_wrapper",
    "distributed_equivalence",
    "parameters_not_in_wrapper",
    faulty=with_a_scale(inside=False),
    fixed=with_a_scale(inside=True),
    culprits=("parts.log_scale",),
    quick=True,
)
