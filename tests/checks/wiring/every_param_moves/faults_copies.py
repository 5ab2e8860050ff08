"""Steps whose updates never reach the model: written into copies, into masters, into one flat vector."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# An optimizer of one's own that computes new values and rebinds a local name.


class NesterovInPlace(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def apply(self, p, update):
        p.sub_(update)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                speed = self.state[p].setdefault("speed", torch.zeros_like(p))
                speed.mul_(group["momentum"]).add_(p.grad)
                self.apply(p, group["lr"] * (p.grad + group["momentum"] * speed))
        return loss


class NesterovOnCopies(NesterovInPlace):
    def apply(self, p, update):
        p = p - update


def classified(optimizer_class):
    def make():
        model = mlp(6, 24, 3)
        optimizer = optimizer_class(model.parameters())

        def fit(batches):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "own_optimizer_updates_copies",
    "every_param_moves",
    "not_updated",
    culprits=("0.weight", "0.bias", "2.weight", "2.bias"),
    where="optimizer.step()",
    faulty=classified(NesterovOnCopies),
    fixed=classified(NesterovInPlace),
)


# Weights in bfloat16, an optimizer that steps float32 values of them, and a write-back that was forgotten.


class Widened(torch.optim.Optimizer):
    write_back = True

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                wide = self.state[p].setdefault("wide", p.detach().float().clone())
                wide.add_(p.grad.float(), alpha=-group["lr"])
                if self.write_back:
                    p.copy_(wide)


class NeverNarrowed(Widened):
    write_back = False


def narrow(optimizer_class):
    def make():
        model = mlp(6, 24, 1).bfloat16()
        optimizer = optimizer_class(model.parameters())

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x.bfloat16()).float(), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "wide_values_never_written_back",
    "every_param_moves",
    "not_updated",
    culprits=("0.weight", "2.weight"),
    faulty=narrow(NeverNarrowed),
    fixed=narrow(Widened),
)


# Float32 masters beside a bfloat16 model, stepped by torch's AdamW, and never copied into it.


def train_masters(model, masters, optimizer, batches, copied_back):
    for x, y in batches:
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        model.zero_grad()
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if copied_back:
            with torch.no_grad():
                for master, p in zip(masters, model.parameters(), strict=True):
                    p.copy_(master)


def masters(copied_back):
    def make():
        model = mlp(6, 24, 3).bfloat16()
        wide = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.AdamW(wide, lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train_masters(model, wide, optimizer, batches, copied_back),
        )

    return make


pair(
    "masters_never_copied_back",
    "optimizer_holds_every_param",
    "not_in_optimizer",
    culprits=("0.weight", "2.bias"),
    where="optimizer.step()",
    faulty=masters(copied_back=False),
    fixed=masters(copied_back=True),
)
