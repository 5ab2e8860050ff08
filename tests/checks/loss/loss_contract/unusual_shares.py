"""Classes that are ignored, zeros in a mean, and repeated predictions that are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_contract.faults_of_shares import generator, loop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd


@odd(
    notes="positives and unlabelled rows: class 0 is ignored as a label, and trained by a prior on the rows without one"
)
def positives_and_unlabelled_rows() -> TrainLoop:
    x = torch.randn(24, 6, generator=generator())
    labels = (x[:, 0] > 0.5).long()

    def loss_of(model, batch):
        x, labels = batch
        log_p = model(x).log_softmax(-1)
        share = log_p[labels == 0].exp().mean(0)
        return F.nll_loss(log_p, labels, ignore_index=0) + (share[1] - 0.1).square() * 10

    return loop(mlp(6, 24, 2), (x, labels), loss_of)


@odd(notes="errors below a margin count as zero in the mean: a mask of the values, and not of the batch")
def errors_below_a_margin() -> TrainLoop:
    x = torch.randn(12, 6, generator=generator())
    batch = {"x": x, "y": x.cumsum(1), "seen": torch.rand(12, 6, generator=generator(1)) < 0.7}

    def loss_of(model, batch):
        each = F.l1_loss(model(batch["x"]), batch["y"], reduction="none")
        weights = 0.5 + 0.5 * batch["seen"]
        return (each * weights * (each > 0.1)).mean()

    return loop(mlp(6, 24, 6), batch, loss_of)


@odd(notes="one score for what several people have said, an axis inserted for them")
def one_score_for_several_raters() -> TrainLoop:
    x = torch.randn(16, 6, generator=generator())
    ratings = x[:, :1] + 0.3 * torch.randn(16, 4, generator=generator(1))

    def loss_of(model, batch):
        x, ratings = batch
        return F.mse_loss(model(x).squeeze(-1)[:, None].expand_as(ratings), ratings)

    return loop(mlp(6, 24, 1), (x, ratings), loss_of)


class Critics(nn.Module):
    """Five critics, a value of each."""

    def __init__(self):
        super().__init__()
        self.critics = nn.ModuleList([mlp(6, 16, 1) for _ in range(5)])

    def forward(self, x):
        return torch.stack([critic(x) for critic in self.critics])


@odd(notes="an ensemble of critics: one target for all of them, which torch warns of")
def one_target_for_an_ensemble() -> TrainLoop:
    x = torch.randn(16, 6, generator=generator())
    return loop(Critics(), (x, x[:, :1].sin()), lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))


@odd(notes="quantiles for each row against its return: the axis of quantiles is inserted in the returns")
def quantiles_of_one_return():
    def loss_of(model, batch):
        features, returns = batch
        errors = returns.reshape(-1)[:, None] - model(features)
        levels = torch.linspace(0.1, 0.9, errors.shape[1])
        return torch.maximum(levels * errors, (levels - 1) * errors).mean()

    return loop(mlp(6, 32, 16), data.table(), loss_of)


@odd(notes="every pair of rows is ranked: the axis is inserted by the loss")
def ranks_of_all_pairs_of_rows():
    def loss_of(model, batch):
        features, returns = batch
        scores, wanted = model(features)[:, 0], returns.reshape(-1)
        above = (wanted[:, None] > wanted[None]).float()
        return (above * F.softplus(scores[None] - scores[:, None])).mean()

    return loop(mlp(6, 32, 1), data.table(), loss_of)
