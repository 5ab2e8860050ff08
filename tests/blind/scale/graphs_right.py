"""Graphs that see what changes."""

from __future__ import annotations

import functools
import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def regress(forward, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(forward(x), y).backward()
        optimizer.step()


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
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: regress(forward, optimizer, bs))


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


class Cosine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 10), nn.Linear(10, 1)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.sigmoid(self.a(x) / self.temperature))


@right(
    "graphs",
    "an annealed float is set from outside; its guard fails, and it becomes an input of the graph",
    thread="pytorch/pytorch#117496",
)
def annealed_float(compile=False):
    model = Cosine()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def train(batches):
        for step, (x, y) in enumerate(batches):
            model.temperature = 0.2 + 0.8 * math.cos(step / 5)
            optimizer.zero_grad()
            F.mse_loss(forward(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 7), torch.randn(8, 1)), fit=train)


@right("graphs", "draws of Python's own generator are made outside and handed over", thread="pytorch/pytorch#197085")
def drawn_outside(compile=False):
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def objective(x, order, weight):
        return weight * F.mse_loss(model(x[order]), x[order])

    run = torch.compile(objective, backend="aot_eager") if compile else objective
    rng = random.Random(4)

    def train(batches):
        for x in batches:
            order = torch.tensor(rng.sample(range(len(x)), len(x) // 2))
            optimizer.zero_grad()
            run(x, order, torch.tensor(rng.uniform(0.5, 1.5))).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(8, 5), fit=train)


@functools.lru_cache(maxsize=8)
def frequencies(width: int) -> tuple[float, ...]:
    return tuple(1.0 / 100 ** (i / width) for i in range(width))


class Positions(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.width, self.mix = width, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        table = torch.sin(steps * torch.tensor(frequencies(self.width), dtype=x.dtype))
        return self.mix(x + table)


@right(
    "graphs",
    "a cached function without randomness or state: traced through, it gives what it gave",
    thread="pytorch/pytorch#152994",
)
def cached_frequencies(compile=False):
    model = Positions()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 4, 6), torch.randn(8, 4, 6))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: regress(forward, optimizer, bs))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = nn.Linear(8, 12), nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, strength: float):
        h = torch.tanh(self.features(x))
        return self.label(h), self.domain(Reverse.apply(h, strength))


@right("graphs", "gradient reversal whose strength grows each step", thread="pytorch/pytorch#124827")
def gradient_reversal(compile=False):
    model = Domains()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(batches):
        for step, (x, label, domain) in enumerate(batches):
            strength = 2 / (1 + math.exp(-step)) - 1
            a, b = forward(x, strength)
            optimizer.zero_grad()
            (F.cross_entropy(a, label) + F.cross_entropy(b, domain)).backward()
            optimizer.step()

    batch = (torch.randn(8, 8), torch.randint(3, (8,)), torch.randint(2, (8,)))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)


@torch.library.custom_op("blind_scale_right::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@cubed.register_fake
def _(x):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _derivative(ctx, grad):
    (x,) = ctx.saved_tensors
    return 3 * grad * x.square()


cubed.register_autograd(_derivative, setup_context=_save)


@right(
    "graphs",
    "an operator of the project's own stands in when compiling, with the derivative of its eager twin",
    thread="pytorch/pytorch#124071",
)
def operator_stands_in(compile=False):
    first, second = nn.Linear(6, 10), nn.Linear(10, 1)
    model = nn.ModuleList([first, second])
    activation = cubed if compile else lambda t: t.pow(3)

    def forward(x):
        return second(activation(first(x)))

    run = torch.compile(forward, backend="aot_eager", fullgraph=True) if compile else forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = (torch.randn(8, 6), torch.randn(8, 1))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: regress(run, optimizer, bs))


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        error = (self.net(x) - y).abs().squeeze(-1)
        limit = error.detach().median().item()
        if limit > 0.1:
            return torch.where(error < limit, error.square(), 2 * limit * error - limit**2).mean()
        return error.square().mean()


@right("graphs", "a branch on a value breaks the graph in two, and nothing else", thread="pytorch/pytorch#105863")
def branch_on_value(compile=False):
    model = Clipped()
    objective = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            objective(x, y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 5), torch.randn(8, 1)), fit=train)


@right("graphs", "hooks are put on before anything is compiled", thread="pytorch/pytorch#117758")
def hooks_first(compile=False):
    model = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 3))
    model.register_parameter("scale", nn.Parameter(torch.full((14,), 0.5)))
    model[0].register_forward_hook(lambda module, args, out: out * model.scale)
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 7), torch.randn(8, 3))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: regress(forward, optimizer, bs))


@right(
    "graphs",
    "the critic that a second derivative is taken of is left uncompiled; the generator is compiled",
    thread="pytorch/pytorch#181581",
)
def critic_left_eager(compile=False):
    critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    make = torch.compile(generator, backend="aot_eager") if compile else generator
    oc = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    og = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))

    def train(batches):
        for real, z in batches:
            with torch.no_grad():
                fake = make(z)
            mixed = (0.5 * real + 0.5 * fake).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            oc.zero_grad()
            (critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
            oc.step()
            og.zero_grad()
            (-critic(make(z)).mean()).backward()
            og.step()

    return TrainLoop(
        model={"critic": critic, "generator": generator},
        optimizer=[oc, og],
        batch=(torch.randn(8, 6), torch.randn(8, 4)),
        fit=train,
    )


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

    def train(batches):
        for ids, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(forward(ids).mean(1), y).backward()
            optimizer.step()

    batch = (torch.randint(20, (8, 5)), torch.randint(3, (8,)))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)


@right(
    "graphs",
    "sequences of other lengths: the graph is made once more with a symbol, and then for all",
    thread="pytorch/pytorch#190631",
)
def changing_lengths(compile=False):
    model = nn.Sequential(nn.Embedding(15, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 15))
    forward = torch.compile(model, backend="aot_eager", dynamic=None) if compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for step, ids in enumerate(batches):
            ids = ids[:, : 6 + 2 * (step % 3)]
            optimizer.zero_grad()
            F.cross_entropy(forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randint(15, (8, 12)), fit=train)
