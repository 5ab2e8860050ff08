"""Functions with a backward of their own: rounding, hard choices, fixed points, fake quantisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def adam_loop(model, lr=1e-2, batches=None):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=batches,
        fit=lambda given: train(model, optimizer, given),
    )


class BinaryActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class BinaryNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)

    def forward(self, x):
        return self.second(BinaryActivation.apply(self.norm(self.first(x))))


@odd(
    notes="small changes of the first layer do not change the loss at all, yet it has gradients "
    "(straight-through estimator)"
)
def straight_through_binary_activations() -> TrainLoop:
    return adam_loop(BinaryNet(), batches=fresh(points))


class FakeQuantize(nn.Module):
    """Rounds to a grid of 8 bits; the range follows the weights by a running maximum."""

    def __init__(self, bits=8):
        super().__init__()
        self.levels = 2 ** (bits - 1) - 1
        self.register_buffer("bound", torch.zeros(()))

    def forward(self, w):
        with torch.no_grad():
            self.bound.copy_(torch.maximum(0.9 * self.bound, w.abs().max()))
        scale = self.bound / self.levels
        return w + ((w / scale).round() * scale - w).detach()


class QuantizedLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.quantize = FakeQuantize()

    def forward(self, x):
        return F.linear(x, self.quantize(self.weight), self.bias)


@odd(notes="weights are rounded in the forward pass and detached in part (quantisation-aware training)")
def quantisation_aware_training() -> TrainLoop:
    return adam_loop(nn.Sequential(QuantizedLinear(8, 16), nn.ReLU(), QuantizedLinear(16, 4)))


class Ternary(nn.Module):
    def forward(self, w):
        scale = w.abs().mean()
        return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()


@odd(notes="the trained weights are hidden behind a parametrization that rounds them to three values (BitNet)")
def ternary_weights_by_parametrization() -> TrainLoop:
    model = relu_mlp(8, 16, 16, 4)
    for layer in model[::2]:
        parametrize.register_parametrization(layer, "weight", Ternary())
    return adam_loop(model, batches=fresh(points))


class LearnedStep(nn.Module):
    """LSQ: the step of the grid is a parameter with a scaled gradient."""

    def __init__(self, init=0.1, levels=7):
        super().__init__()
        self.step, self.levels = nn.Parameter(torch.tensor(init)), levels

    def forward(self, x):
        factor = (x.numel() * self.levels) ** -0.5
        step = (self.step - self.step * factor).detach() + self.step * factor
        scaled = (x / step).clamp(-self.levels, self.levels)
        return (scaled + (scaled.round() - scaled).detach()) * step


@odd(notes="a parameter's gradient is scaled down by a detach trick that leaves its value as it is (LSQ)")
def learned_step_size_quantisation() -> TrainLoop:
    return adam_loop(nn.Sequential(nn.Linear(8, 16), LearnedStep(), nn.ReLU(), nn.Linear(16, 4)))


class HardGate(nn.Module):
    def __init__(self, choices=4, width=12):
        super().__init__()
        self.choose = nn.Linear(8, choices)
        self.values = nn.Embedding(choices, width)
        self.skip, self.head = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x, tau=1.0):
        pick = F.gumbel_softmax(self.choose(x), tau=tau, hard=True)
        return self.head(torch.relu(self.skip(x)) + pick @ self.values.weight)


def train_annealed(model, optimizer, batches):
    for step, (x, y) in enumerate(batches):
        tau = max(0.5, 1.0 - 0.01 * step)
        optimizer.zero_grad()
        F.cross_entropy(model(x, tau), y).backward()
        optimizer.step()


@odd(
    notes="a hard sample in the forward pass and a soft gradient; the temperature falls with the step (Gumbel softmax)"
)
def gumbel_softmax_hard_choices() -> TrainLoop:
    model = HardGate()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_annealed(model, optimizer, batches),
    )


class DEQ(nn.Module):
    """Deep equilibrium layer: the fixed point is found without a graph, the backward solves for it again."""

    def __init__(self, width=10, iterations=8):
        super().__init__()
        self.inject, self.state = nn.Linear(8, width), nn.Linear(width, width, bias=False)
        self.head, self.iterations = nn.Linear(width, 4), iterations
        with torch.no_grad():
            self.state.weight.mul_(0.5)

    def cell(self, z, u):
        return torch.tanh(self.state(z) + u)

    def forward(self, x):
        u = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(self.iterations):
                z = self.cell(z, u)
        z = self.cell(z, u)
        z0 = z.detach().requires_grad_(True)
        f0 = self.cell(z0, u.detach())

        def solve(gradient):
            g = gradient
            for _ in range(self.iterations):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + gradient
            return g

        if z.requires_grad:
            z.register_hook(solve)
        return self.head(z)


@odd(
    notes="the layer runs under no_grad, then once with a graph; "
    "a tensor hook calls autograd.grad within backward (DEQ)"
)
def deep_equilibrium_fixed_point() -> TrainLoop:
    return adam_loop(DEQ(), lr=5e-3)


class SpikeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, potential):
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (potential,) = ctx.saved_tensors
        return gradient / (1 + 5 * potential.abs()).square()


class SpikingNet(nn.Module):
    """Leaky integrate-and-fire units; the reset is detached, as is usual."""

    def __init__(self, steps=4):
        super().__init__()
        self.first, self.second, self.steps = nn.Linear(8, 20), nn.Linear(20, 4), steps

    def forward(self, x):
        potential, counts = torch.zeros(len(x), 20), 0.0
        for _ in range(self.steps):
            potential = 0.8 * potential + self.first(x)
            spikes = SpikeFunction.apply(potential - 0.5)
            potential = potential - 0.5 * spikes.detach()
            counts = counts + self.second(spikes)
        return counts / self.steps


@odd(notes="a step function with a surrogate gradient, applied over time, the reset detached (spiking network)")
def spiking_network_surrogate_gradient() -> TrainLoop:
    return adam_loop(SpikingNet(), batches=fresh(points))


class SlowTrunk(nn.Module):
    """Gradients are scaled on their way: the trunk learns at a tenth of the head's pace."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)

    def forward(self, x):
        h = self.trunk(x)
        h = 0.9 * h.detach() + 0.1 * h
        return self.head(h)


@odd(notes="nine tenths of the activation are detached: the trunk's gradient is a tenth, its value is whole")
def gradient_scaled_by_partial_detach() -> TrainLoop:
    return adam_loop(SlowTrunk())
