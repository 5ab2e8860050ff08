"""Rows that are normalised by each other on purpose: whitened, ranked, contrasted, one data set as one batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


class Standardising(nn.Module):
    """The columns of the data set are brought to unit spread on the way in: all rows are always given."""

    def __init__(self):
        super().__init__()
        self.body = mlp(6, 24, 3)

    def forward(self, x):
        return self.body((x - x.mean(0)) / (x.std(0) + 1e-6))


@odd(notes="a small table is one batch, and the model standardises its columns")
def table_that_is_one_batch() -> TrainLoop:
    return loop(Standardising(), data.labelled(), lambda m, b: F.cross_entropy(m(b[0]), b[1]))


@odd(notes="the same, and the project declares that rows interact")
def table_that_is_one_batch_declared() -> TrainLoop:
    return loop(Standardising(), data.labelled(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), rows_interact=True)


class Whitened(nn.Module):
    """Embeddings with the covariance of a unit ball over the batch (W-MSE)."""

    def __init__(self):
        super().__init__()
        self.body = mlp(6, 24, 4)

    def forward(self, x):
        z = self.body(x)
        z = z - z.mean(0)
        covariance = z.T @ z / (len(z) - 1) + 1e-3 * torch.eye(z.shape[1], dtype=z.dtype)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), z.T, upper=False).T


@odd(notes="embeddings are whitened over the batch before views are compared")
def embeddings_whitened_over_the_batch() -> TrainLoop:
    x, _ = data.labelled()
    views = (x, x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(4)))
    return loop(Whitened(), views, lambda m, b: F.mse_loss(m(b[0]), m(b[1])))


@odd(notes="advantages are brought to unit spread over the batch outside of the policy")
def advantages_of_unit_spread() -> TrainLoop:
    def loss_of(model, batch):
        states, actions, returns = batch
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        chosen = model(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        return -(chosen * advantages).mean() + 0.05 * chosen.square().mean()

    return loop(mlp(4, 24, 3), data.episode(), loss_of)


@odd(notes="scores of all pairs are normalised along both axes of the batch (a contrastive loss)")
def pairs_contrasted_along_both_axes() -> TrainLoop:
    def loss_of(model, batch):
        z = F.normalize(model(batch[0]), dim=-1)
        other = F.normalize(model(batch[0] + 0.1 * batch[0].roll(1, 1)), dim=-1)
        scores = z @ other.T / 0.2
        return -(scores.log_softmax(0).diagonal() + scores.log_softmax(1).diagonal()).mean() / 2

    return loop(mlp(6, 24, 8), data.labelled(), loss_of)


class OverItems(nn.Module):
    """One list of items a batch: a share of attention for each, which sums to 1 over the list."""

    def __init__(self):
        super().__init__()
        self.score = mlp(6, 24, 1)

    def forward(self, items):
        return self.score(items).softmax(0)


@odd(notes="a batch is one list of items, and scores are a distribution over the list")
def shares_of_one_list_of_items() -> TrainLoop:
    items, kind = data.labelled()
    wanted = (kind == 0).to(items.dtype)[:, None]

    def loss_of(model, batch):
        return -(batch[1] / batch[1].sum() * model(batch[0]).log()).sum()

    return loop(OverItems(), (items, wanted), loss_of, rows_interact=True)


@odd(notes="inputs are standardised over the batch by the loop, before the model is called")
def inputs_standardised_by_the_loop() -> TrainLoop:
    def loss_of(model, batch):
        x = (batch[0] - batch[0].mean(0)) / batch[0].std(0)
        return F.cross_entropy(model(x), batch[1])

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)
