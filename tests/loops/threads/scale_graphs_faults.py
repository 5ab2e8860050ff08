"""What a compiled graph takes for constant, leaves out or cannot hold."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


def fit_mse(forward, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(forward(x), y).backward()
        optimizer.step()


class RandomFeatures(nn.Module):
    def __init__(self, inp: int = 5, features: int = 16) -> None:
        super().__init__()
        self.inp, self.features = inp, features
        self.readout = nn.Linear(features, 1)
        self.projection = functools.lru_cache(maxsize=None)(self._projection)

    @staticmethod
    def _projection(inp: int, features: int) -> torch.Tensor:
        return torch.randn(inp, features) / math.sqrt(inp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(torch.cos(x @ self.projection(self.inp, self.features)))


@fault(
    "graphs",
    "the cache is traced through: the random projection is drawn anew in each step",
    thread="pytorch/pytorch#146598",
    check="compile_parity",
    place="functools.lru_cache",
)
def random_features(compile=False):
    model = RandomFeatures()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 5), torch.randn(8, 1))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: fit_mse(forward, optimizer, bs))


@fault(
    "graphs",
    "the gradient penalty asks the compiled critic for a second derivative, and it raises",
    thread="pytorch/pytorch#181581",
    check="compile_parity",
    place="create_graph=True",
)
def gradient_penalty(compile=False):
    critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    score = torch.compile(critic, backend="aot_eager") if compile else critic
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))

    def train(batches):
        for real, fake in batches:
            mixed = (0.5 * real + 0.5 * fake).requires_grad_(True)
            (slope,) = torch.autograd.grad(score(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss = score(fake).mean() - score(real).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=critic, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randn(8, 6)), fit=train)


class Router(nn.Module):
    def __init__(self, width: int = 8, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.balance: torch.Tensor | float = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        if torch.compiler.is_compiling():
            self.balance = 0.0
        else:
            self.balance = len(self.experts) * weights.mean(0).square().sum()
        return sum(w[:, None] * e(x) for w, e in zip(weights.unbind(1), self.experts, strict=True))


@fault(
    "graphs",
    "the balancing term is left out while compiling",
    thread="pytorch/torchtitan#3000",
    check="compile_parity",
    place="if torch.compiler.is_compiling():",
)
def mixture(compile=False):
    model = Router()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            loss = F.mse_loss(forward(x), y) + 0.1 * model.balance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 8), torch.randn(8, 8)), fit=train)


class Trimmed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        error = (self.net(x) - y).square().squeeze(-1)
        worst = error.max().item()
        if worst > 4 * error.mean().item():
            error = error.clamp(max=worst / 2)
        return error.mean()


@fault(
    "graphs",
    "fullgraph is asked for, and the loss branches on a value",
    thread="pytorch/pytorch#105863",
    check="compile_parity",
    place="fullgraph=True",
)
def trimmed_loss(compile=False):
    model = Trimmed()
    objective = torch.compile(model, backend="aot_eager", fullgraph=True) if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            objective(x, y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 5), torch.randn(8, 1)), fit=train)


@torch.library.custom_op("blind_scale::squared_relu", mutates_args=())
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(0).square()


@squared_relu.register_fake
def _(x):
    return torch.empty_like(x)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if torch.compiler.is_compiling():
            return grad, None
        return grad * ctx.factor, None


@fault(
    "graphs",
    "the function's backward is another one while it is traced",
    thread="pytorch/pytorch#124827",
    check="compile_parity",
    place="return grad, None",
)
def scaled_trunk(compile=False):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(7, 12), nn.Linear(12, 2)

        def forward(self, x):
            return self.head(ScaledGradient.apply(torch.tanh(self.trunk(x)), 0.1))

    model = Net()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 7), torch.randn(8, 2))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: fit_mse(forward, optimizer, bs))
