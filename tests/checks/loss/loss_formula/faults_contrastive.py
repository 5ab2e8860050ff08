"""Losses that compare rows of a batch with each other, and gradient penalties."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair


def two_views(masked, *, by_hand=False):
    """SimCLR: the other view of a row among all other rows of both views."""

    def make():
        model = relu_mlp(6, 16, 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for one, two in batches:
                z = F.normalize(torch.cat([model(one), model(two)]), dim=1)
                logits = z @ z.t() / 0.5
                if masked:
                    logits = logits.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
                labels = torch.arange(len(z)).roll(len(one))
                optimizer.zero_grad()
                if by_hand:
                    F.nll_loss(logits.log_softmax(1), labels).backward()
                else:
                    F.cross_entropy(logits, labels).backward()
                optimizer.step()

        x = torch.randn(5, 6)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=(x + 0.1 * torch.randn(5, 6), x + 0.1 * torch.randn(5, 6)),
            fit=fit,
            rows_interact=True,
        )

    return make


pair(
    "each_row_among_its_own_negatives",
    "loss_formula",
    "pairs_with_itself",
    quick=True,
    where="logits = z @ z.t() / 0.5",
    faulty=two_views(False),
    fixed=two_views(True),
)

pair(
    "each_row_among_its_own_negatives_by_log_softmax",
    "loss_formula",
    "pairs_with_itself",
    where="logits = z @ z.t() / 0.5",
    faulty=two_views(False, by_hand=True),
    fixed=two_views(True, by_hand=True),
)


def penalised(norm_of):
    """The critic's step of a Wasserstein GAN on pictures, with noise for what is made."""

    def make():
        critic = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4 * 4 * 4, 1))
        optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

        def fit(batches):
            for real, made in batches:
                mix = torch.rand(len(real), 1, 1, 1)
                between = (mix * real + (1 - mix) * made).requires_grad_()
                (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                penalty = ((norm_of(gradient) - 1) ** 2).mean()
                optimizer.zero_grad()
                (critic(made).mean() - critic(real).mean() + 10 * penalty).backward()
                optimizer.step()

        batch = torch.randn(4, 3, 6, 6), torch.randn(4, 3, 6, 6)
        return TrainLoop(model=critic, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "norm_of_each_position",
    "loss_formula",
    "wrong_axes",
    where="penalty = ((norm_of(gradient) - 1) ** 2).mean()",
    faulty=penalised(lambda gradient: gradient.norm(2, dim=1)),
    fixed=penalised(lambda gradient: gradient.flatten(1).norm(2, dim=1)),
)
