"""Ratios of signal to distortion written by hand."""

from __future__ import annotations

import torch

from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def denoiser(energy_of):
    """A small net that takes noise off short signals."""

    def loss_of(estimate, clean):
        clean, estimate = (x - x.mean(-1, keepdim=True) for x in (clean, estimate))
        energy = energy_of(clean, estimate).square().sum(-1, keepdim=True) + 1e-8
        target = (clean * estimate).sum(-1, keepdim=True) * clean / energy
        ratio = target.square().sum(-1) / ((estimate - target).square().sum(-1) + 1e-8)
        return -10 * torch.log10(ratio + 1e-8).mean()

    def make():
        clean = torch.sin(torch.rand(8, 1) * torch.arange(12.0) + torch.rand(8, 1))
        model = mlp(12, 16, 12)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return loop(
            model,
            (clean + 0.3 * torch.randn(clean.shape), clean),
            lambda model, batch: loss_of(model(batch[0]), batch[1]),
            optimizer,
        )

    return make


pair(
    "projection_by_the_energy_of_the_estimate",
    "loss_formula",
    "turned_round",
    level="advice",
    where="return -10 * torch.log10",
    faulty=denoiser(lambda clean, estimate: estimate),
    fixed=denoiser(lambda clean, estimate: clean),
)
