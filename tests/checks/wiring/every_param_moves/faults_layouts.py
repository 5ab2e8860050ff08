"""Updates that are written to a copy, since the memory of the weight is not contiguous."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import cross_entropy, loop


def with_turned_weight(model, path="0"):
    """A layer imported from a framework that keeps its matrices as inputs by outputs: it is turned, not copied."""
    layer = model.get_submodule(path)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


# Gradient descent by hand, on flat weights.


def descended(update):
    def make():
        model = with_turned_weight(mlp(6, 24, 3))

        def fit(batches, lr=0.1):
            for x, y in batches:
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for p in model.parameters():
                    update(p, p.grad, lr)

        return TrainLoop(model=model, batch=data.labelled(), fit=fit)

    return make


def on_flat_weights(p, gradient, lr):
    p.data.contiguous().view(-1).sub_(gradient.reshape(-1), alpha=lr)


def on_the_weights(p, gradient, lr):
    p.data.sub_(gradient, alpha=lr)


pair(
    "flat_update_by_hand_of_a_turned_weight",
    "every_param_moves",
    "written_to_a_copy",
    culprits=("0.weight",),
    faulty=descended(on_flat_weights),
    fixed=descended(on_the_weights),
)


# An optimizer of one's own that works on flat tensors.


class FlatMomentum(torch.optim.Optimizer):
    """Keeps one flat buffer for each weight."""

    def __init__(self, params, lr=0.05, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def flat(self, p):
        return p.data.reshape(-1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros(p.numel(), dtype=p.dtype))
                buffer.mul_(group["momentum"]).add_(p.grad.reshape(-1))
                self.flat(p).add_(buffer, alpha=-group["lr"])


class FlatMomentumWrittenBack(FlatMomentum):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros(p.numel(), dtype=p.dtype))
                buffer.mul_(group["momentum"]).add_(p.grad.reshape(-1))
                p.add_(buffer.view_as(p), alpha=-group["lr"])


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


def pictures(optimizer_class):
    def make():
        model = Pictures()
        model.conv.weight = nn.Parameter(model.conv.weight.detach().transpose(0, 3).contiguous().transpose(0, 3))
        optimizer = optimizer_class(model.parameters())
        return loop(model, data.images(), cross_entropy, optimizer)

    return make


pair(
    "own_optimizer_steps_flat_weights_of_a_turned_filter",
    "every_param_moves",
    "written_to_a_copy",
    culprits=("conv.weight",),
    where="optimizer.step()",
    faulty=pictures(FlatMomentum),
    fixed=pictures(FlatMomentumWrittenBack),
)
