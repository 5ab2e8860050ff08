"""Models, copies, losses and optimizers that are others once they are compiled, or that only seem to be."""

from __future__ import annotations

import copy
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault, right
from tests.loops.threads.shared import cross_entropy_of, fit_with, stepped


class Encoder(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.patch = nn.Linear(9, 16)
        self.pos_embed = nn.Parameter(torch.randn(16) * 0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x) + self.pos_embed
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def images(rows: int = 8, classes: int = 4):
    return torch.randn(rows, 9), torch.randint(classes, (rows,))


@fault(
    "copies",
    "a copy is compiled and called, and the optimizer steps the model that it was copied from",
    thread="deepmodeling/deepmd-kit#5818",
    check="compile_parity",
    place="copy.deepcopy(model)",
)
def compiled_copy(compile=False):
    model = Encoder(classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_model = torch.compile(copy.deepcopy(model), backend="aot_eager") if compile else model
    return stepped(model, optimizer, cross_entropy_of(step_model), batch=images(8, 3))


class SegmentNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 16), nn.ReLU())
        self.main, self.aux = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor):
        h = self.body(x)
        return self.main(h), self.aux(h)


def plain_loss(outputs, y):
    return F.cross_entropy(outputs[0], y)


def auxiliary_loss(outputs, y):
    return F.cross_entropy(outputs[0], y) + 0.4 * F.cross_entropy(outputs[1], y)


LOSSES = {SegmentNet: auxiliary_loss}


@fault(
    "copies",
    "the loss is chosen by the model's type, which is another one for the compiled model",
    thread="skorch-dev/skorch#1058",
    check="compile_parity",
    place="LOSSES.get(type(model), plain_loss)",
)
def loss_by_type(compile=False):
    model = SegmentNet()
    if compile:
        model = torch.compile(model, backend="aot_eager")
    criterion = LOSSES.get(type(model), plain_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    return stepped(model, optimizer, lambda x, y: criterion(model(x), y), batch=images())


@fault(
    "copies",
    "the checkpoint has the compiled model's keys and is loaded without strict into the raw one: weights begin anew",
    thread="FareedKhan-dev/train-llm-from-scratch#37",
    check="compile_parity",
    place="strict=False",
)
def resumed_without_strict(compile=False):
    raw = Encoder()
    model = torch.compile(raw, backend="aot_eager") if compile else raw
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)

    def save_checkpoint(path):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load_checkpoint(path):
        state = torch.load(path)
        raw.load_state_dict({k.replace("module.", ""): v for k, v in state["model"].items()}, strict=False)
        optimizer.load_state_dict(state["optimizer"])

    return stepped(raw, optimizer, cross_entropy_of(model), batch=images(), save=save_checkpoint, load=load_checkpoint)


def mse_of(forward):
    return lambda x, y: F.mse_loss(forward(x), y)


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
    return stepped(model, optimizer, mse_of(forward), batch=batch)


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

    def loss_of(real, fake):
        mixed = (0.5 * real + 0.5 * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(score(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return score(fake).mean() - score(real).mean() + 10 * penalty

    batch, fit = (torch.randn(8, 6), torch.randn(8, 6)), fit_with(optimizer, loss_of)
    return TrainLoop(model=critic, optimizer=optimizer, batch=batch, fit=fit)


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
    return stepped(model, optimizer, mse_of(forward), batch=batch)


class Counting(nn.Module):
    def __init__(self, warmup: int = 3) -> None:
        super().__init__()
        self.trunk, self.out = nn.Linear(6, 12), nn.Linear(12, 2)
        self.calls, self.warmup = 0, warmup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.out(torch.tanh(self.trunk(x))) * min(1.0, self.calls / self.warmup)


@right(
    "graphs",
    "a counter of the module is written and read in forward; it is guarded, and the graph is made anew",
    thread="Koratahiu/Advanced_Optimizers#6",
)
def counter_in_forward(compile=False):
    model = Counting()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 6), torch.randn(8, 2))
    return stepped(model, optimizer, mse_of(forward), batch=batch)


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.clear()
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.losses.append(x.square().mean())
        return x


@right(
    "graphs",
    "auxiliary losses are collected in a list of the module: the list is written after the graph has run",
    thread="pytorch/torchtitan#2061",
)
def list_of_losses(compile=False):
    model = Collecting()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for x in batches:
            loss = F.mse_loss(forward(x), x) + 0.01 * sum(model.losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(8, 8), fit=train)


@right("graphs", "the part that cannot be traced is switched off for the compiler", thread="pytorch/pytorch#123979")
def part_left_out(compile=False):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8)

        @torch.compiler.disable
        def forward(self, ids):
            unique, where = torch.unique(ids, return_inverse=True)
            return self.embed(unique)[where]

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse, self.head = Sparse(), nn.Linear(8, 3)

        def forward(self, ids):
            rows = self.sparse(ids)
            return self.head(torch.tanh(rows))

    model = Tagger()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    batch = (torch.randint(20, (8, 5)), torch.randint(3, (8,)))
    return stepped(model, optimizer, lambda ids, y: F.cross_entropy(forward(ids).mean(1), y), batch=batch)
