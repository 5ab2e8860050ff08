"""The graph is whole, but the gradient is exactly zero although the loss depends: rounding, steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.checks.wiring.gradient_reaches_every_param.faults_dead_activation import loop, regress
from tests.loops import data
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"


def vanished(name, where, culprits, broken, whole, loss=regress):
    pair(
        name,
        CHECK,
        "gradient_vanished",
        culprits=culprits,
        where=where,
        faulty=loop(broken, data.table, loss),
        fixed=loop(whole, data.table, loss),
    )


def straight_through(rounded, x):
    return x + (rounded - x).detach()


class Coded(nn.Module):
    """A code between two layers, in the form that a subclass gives it."""

    def __init__(self, width=16):
        super().__init__()
        self.encoder = nn.Linear(6, width)
        self.decoder = nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x):
        return self.decoder(self.code(torch.tanh(self.encoder(x))))


class Rounded(Coded):
    def code(self, h):
        return torch.round(h * 4) / 4


class RoundedStraightThrough(Coded):
    def code(self, h):
        return straight_through(torch.round(h * 4) / 4, h)


class HardStep(Coded):
    def code(self, h):
        return torch.clamp(h * 1e7, 0, 1)


class SoftStep(Coded):
    def code(self, h):
        return torch.sigmoid(h * 4)


ENCODER = ("encoder.weight", "encoder.bias")

vanished("code_rounded", "torch.round(h * 4)", ENCODER, Rounded, RoundedStraightThrough)
vanished("code_clamped_to_a_step", "torch.clamp(h * 1e7, 0, 1)", ENCODER, HardStep, SoftStep)


# A function with a backward of its own that gives zeros for the scale.


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        _x, scale = ctx.saved_tensors
        return grad * scale, torch.zeros_like(scale)


class ScaledRight(Scaled):
    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


class LearnedScale(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.encoder, self.scale = nn.Linear(6, 16), nn.Parameter(torch.ones(16))
        self.decoder, self.function = nn.Linear(16, 1), function

    def forward(self, x):
        return self.decoder(self.function.apply(torch.tanh(self.encoder(x)), self.scale))


vanished(
    "own_backward_gives_zeros_for_the_scale",
    None,
    ("scale",),
    lambda: LearnedScale(Scaled),
    lambda: LearnedScale(ScaledRight),
)


# A spread that begins beyond its clamp.


class Spread(nn.Module):
    """A mean and one spread for all rows, kept within bounds."""

    def __init__(self, start):
        super().__init__()
        self.mean, self.log_std = nn.Linear(6, 1), nn.Parameter(torch.tensor(start))

    def forward(self, x):
        return self.mean(x), self.log_std.clamp(-5.0, 2.0).exp()


def likelihood(model, batch):
    mean, std = model(batch[0])
    return F.gaussian_nll_loss(mean, batch[1], (std**2).expand_as(mean))


vanished(
    "spread_beyond_its_clamp",
    "self.log_std.clamp(-5.0, 2.0)",
    ("log_std",),
    lambda: Spread(2.5),
    lambda: Spread(0.5),
    loss=likelihood,
)
