"""Terms that an ``autograd.Function`` is to give a gradient, and whose result is thrown away."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.checks.loss.every_term_trains.faults import loop
from tests.loops.pairs import pair


class WithTerm(torch.autograd.Function):
    """Gives a tensor back, and a term a gradient of its own."""

    @staticmethod
    def forward(ctx, x, term):
        ctx.size = term.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return slope, slope.new_ones(ctx.size)


class Experts(nn.Module):
    """Two experts, and a gate whose scores are to stay small."""

    def __init__(self, *, kept):
        super().__init__()
        self.gate, self.kept = nn.Linear(6, 2), kept
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x):
        scores = self.gate(x)
        z_loss, shares = 0.1 * scores.logsumexp(-1).square().mean(), scores.softmax(-1)
        if self.kept:
            shares = WithTerm.apply(shares, z_loss)
        else:
            WithTerm.apply(shares, z_loss)
        return sum(shares[:, n : n + 1] * expert(x) for n, expert in enumerate(self.experts))


def experts(*, kept):
    return loop(lambda m, x, y: F.cross_entropy(m(x), y), lambda: Experts(kept=kept))


pair(
    "z_loss_of_experts_in_a_function_that_is_only_called",
    "every_term_trains",
    "term_left_out",
    change="WithTerm.apply(shares, z_loss)",
    faulty=experts(kept=False),
    fixed=experts(kept=True),
)
