"""What a compiled graph takes for constant, leaves out or cannot hold."""

from __future__ import annotations

import functools
import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def fit_mse(forward, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(forward(x), y).backward()
        optimizer.step()


class Variational(nn.Module):
    def __init__(self, warmup: int = 4) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(10, 12), nn.Linear(6, 10)
        self.warmup, self.updates = warmup, 0

    @torch.compiler.assume_constant_result
    def beta(self) -> float:
        return min(1.0, (self.updates + 1) / self.warmup)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_var = self.encode(x).chunk(2, -1)
        rebuilt = self.decode(mean)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1).mean()
        return F.mse_loss(rebuilt, x) + self.beta() * kl


@fault(
    "graphs",
    "the weight of the KL term is marked as constant, so that its warm-up stays at the first value",
    thread="pytorch/pytorch#128437",
    check="compile_parity",
    place="@torch.compiler.assume_constant_result",
)
def kl_warmup(compile=False):
    model = Variational()
    objective = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for x in batches:
            optimizer.zero_grad()
            objective(x).backward()
            optimizer.step()
            model.updates += 1

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(8, 10), fit=train)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(6, 4), nn.Linear(6, 4)
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.gate(x) / self.temperature, -1) * self.out(x)


@fault(
    "graphs",
    "guards are dropped for speed, among them the one on the temperature, which is annealed",
    thread="pytorch/pytorch#139038",
    check="compile_parity",
    place="guard_filter_fn",
)
def annealed_gates(compile=False):
    model = Annealed()
    run = model
    if compile:
        run = torch.compile(
            model, backend="aot_eager", options={"guard_filter_fn": lambda entries: [False for _ in entries]}
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for step, (x, y) in enumerate(batches):
            model.temperature = max(0.5, 2.0 * math.exp(-0.4 * step))
            loss = F.mse_loss(run(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randn(8, 4)), fit=train)


@fault(
    "graphs",
    "whether the second block is dropped is drawn once, while tracing",
    thread="pytorch/pytorch#95425",
    check="compile_parity",
    place="if rng.random() < keep:",
)
def layer_drop(compile=False, keep=0.6):
    rng = random.Random(17)
    first, second, head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    model = nn.ModuleList([first, second, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def classify(x):
        x = x + torch.tanh(first(x))
        if rng.random() < keep:
            x = x + torch.tanh(second(x))
        return head(x)

    forward = torch.compile(classify, backend="aot_eager") if compile else classify

    def train(batches):
        model.train()
        for batch in batches:
            loss = F.cross_entropy(forward(batch["features"]), batch["label"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    batch = {"features": torch.randn(8, 8), "label": torch.randint(2, (8,))}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)


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
    "the hook is put on after a first compiled pass, and the graph does not know it",
    thread="pytorch/pytorch#117758",
    check="compile_parity",
    place="register_forward_hook",
)
def hooked_after_warmup(compile=False):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 3))
    scale = nn.Parameter(torch.full((14,), 0.5))
    model.register_parameter("scale", scale)
    forward = torch.compile(model, backend="aot_eager") if compile else model
    forward(torch.zeros(8, 7)).sum().backward()
    model.zero_grad(set_to_none=True)
    model[0].register_forward_hook(lambda module, args, out: out * scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 7), torch.randn(8, 3))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: fit_mse(forward, optimizer, bs))


class Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 12)
        self.label, self.domain = nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor):
        h = torch.tanh(self.features(x))
        return self.label(h), self.domain(h)


@fault(
    "graphs",
    "after two steps gradients are scaled by a backward hook, which the graph made before does not call",
    thread="pytorch/pytorch#117265",
    check="compile_parity",
    place="register_full_backward_pre_hook",
)
def domain_gradients(compile=False):
    model = Adversary()
    forward = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for step, (x, label, domain) in enumerate(batches):
            if step == 1:
                model.domain.register_full_backward_pre_hook(lambda module, grads: tuple(0.1 * g for g in grads))
            a, b = forward(x)
            optimizer.zero_grad()
            (F.cross_entropy(a, label) + F.cross_entropy(b, domain)).backward()
            optimizer.step()

    batch = (torch.randn(8, 8), torch.randint(3, (8,)), torch.randint(2, (8,)))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)


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


def _keep(ctx, inputs, output):
    ctx.save_for_backward(output)


def _slope(ctx, grad):
    (out,) = ctx.saved_tensors
    return 2 * grad * out


squared_relu.register_autograd(_slope, setup_context=_keep)


class SquaredReLU(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squared_relu(x) if self.fused else F.relu(x).square()


@fault(
    "graphs",
    "the operator that stands in when compiling has twice its output as its slope, not twice the root of it",
    thread="tile-ai/TileOPs#648",
    check="compile_parity",
    place="return 2 * grad * out",
)
def fused_activation(compile=False):
    model = nn.Sequential(nn.Linear(6, 18), SquaredReLU(fused=compile), nn.Linear(18, 2))
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = (torch.randn(8, 6), torch.randn(8, 2))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: fit_mse(forward, optimizer, bs))


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
