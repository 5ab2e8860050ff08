"""Parts whose result a mask or a choice leaves out of the loss, and copies that never give anything back."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop

CHECK = "gradient_reaches_every_param"


def train(model, loss_of, draw, rate=3e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    return loop(model, draw(), loss_of, optimizer, batches=lambda n: (draw() for _ in range(n)))


class Reconstruction(nn.Module):
    """A masked autoencoder over patches: half of them are replaced by one token."""

    def __init__(self):
        super().__init__()
        self.embed, self.mask_token = nn.Linear(12, 24), nn.Parameter(0.02 * torch.randn(24))
        self.decoder = nn.Sequential(nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 12))

    def forward(self, patches):
        keep = torch.rand(patches.shape[:2]).argsort(1).argsort(1) < patches.shape[1] // 2
        seen = self.embed(patches)
        summary = (seen * keep[..., None]).sum(1, keepdim=True) / keep.sum(1)[:, None, None]
        tokens = torch.where(keep[..., None], seen, self.mask_token)
        return self.decoder(torch.cat([tokens, summary.expand_as(tokens)], -1)), keep


def reconstruction(chosen):
    def loss_of(model, patches):
        predicted, keep = model(patches)
        where = chosen(keep)
        return F.mse_loss(predicted[where], patches[where])

    return lambda: train(Reconstruction(), loss_of, lambda: torch.randn(8, 10, 12))


pair(
    "loss_over_the_patches_that_are_kept",
    CHECK,
    "parameter_unused",
    level="advice",
    culprits=("mask_token",),
    where="return F.mse_loss(predicted[where], patches[where])",
    faulty=reconstruction(lambda keep: keep),
    fixed=reconstruction(lambda keep: ~keep),
)


def meta_learner(adapted_weights):
    """One inner step for each task; ``adapted_weights`` makes the weights after it."""

    def loss_of(model, tasks):
        losses = []
        for sx, sy, qx, qy in zip(*tasks, strict=True):
            predict = adapted_weights(model, lambda call, sx=sx, sy=sy: F.mse_loss(call(sx), sy))
            losses.append(F.mse_loss(predict(qx), qy))
        return torch.stack(losses).mean()

    def draw():
        scale, x, more = torch.rand(3, 1, 1) * 2 + 0.5, torch.rand(3, 8, 1) * 4 - 2, torch.rand(3, 8, 1) * 4 - 2
        return x, scale * torch.sin(x), more, scale * torch.sin(more)

    return lambda: train(mlp(1, 24, 1), loss_of, draw)


def in_a_copy(model, loss):
    learner = copy.deepcopy(model)
    slopes = torch.autograd.grad(loss(learner), list(learner.parameters()), create_graph=True)
    for weight, slope in zip(learner.parameters(), slopes, strict=True):
        weight.data -= 0.05 * slope
    return learner


def by_a_functional_call(model, loss):
    weights = dict(model.named_parameters())
    first = loss(lambda x: torch.func.functional_call(model, weights, (x,)))
    slopes = torch.autograd.grad(first, list(weights.values()), create_graph=True)
    moved = {name: w - 0.05 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return lambda x: torch.func.functional_call(model, moved, (x,))


pair(
    "inner_step_in_a_copy_for_each_task",
    CHECK,
    "graph_cut",
    culprits=("0.weight", "2.weight"),
    where="weight.data -= 0.05 * slope",
    faulty=meta_learner(in_a_copy),
    fixed=meta_learner(by_a_functional_call),
)
