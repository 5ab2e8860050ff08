"""Optimizers whose step is as long as the norm of the weight, without an exception for weights that are zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


class Lamb(torch.optim.Optimizer):
    """Adam with a trust ratio for each tensor; ``at_zero`` is that of a weight whose norm is 0."""

    def __init__(self, params, lr=2e-2, betas=(0.9, 0.999), eps=1e-6, at_zero=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.at_zero = at_zero

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - first)
                state["v"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                update = state["m"] / (state["v"].sqrt() + group["eps"])
                norm = p.norm().clamp(max=10)
                trust = norm / (update.norm() + group["eps"]) if norm > 0 else self.at_zero
                p.sub_(update * trust, alpha=group["lr"])


class Lars(torch.optim.Optimizer):
    """SGD with a rate for each tensor; ``spared`` says which tensors get the plain one."""

    def __init__(self, params, lr=0.5, momentum=0.9, trust=0.02, spared=lambda p: False):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.trust, self.spared = trust, spared

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                rate = 1.0 if self.spared(p) else self.trust * p.norm() / (p.grad.norm() + 1e-9)
                moving = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                moving.mul_(group["momentum"]).add_(p.grad * rate)
                p.sub_(moving, alpha=group["lr"])


def zero_biases(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def loop(optimizer_of):
    def make():
        model = zero_biases(mlp(6, 24, 3))
        optimizer = optimizer_of(model.parameters())

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "lamb_without_a_ratio_at_zero",
    "every_param_moves",
    "stays_at_zero",
    culprits=("0.bias", "2.bias"),
    where="optimizer.step()",
    quick=True,
    faulty=loop(Lamb),
    fixed=loop(lambda params: Lamb(params, at_zero=1.0)),
)
pair(
    "lars_scales_biases_too",
    "every_param_moves",
    "stays_at_zero",
    culprits=("0.bias", "2.bias"),
    where="optimizer.step()",
    faulty=loop(Lars),
    fixed=loop(lambda params: Lars(params, spared=lambda p: p.dim() == 1)),
)
