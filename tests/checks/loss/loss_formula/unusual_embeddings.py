"""Right losses of embeddings that resemble a textbook form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_formula.unusual_fields import trained, views
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd


def compared(loss_of, batch, *, model=None):
    made = trained(loss_of, batch, model=model)
    return TrainLoop(model=made.model, optimizer=made.optimizer, batch=made.batch, fit=made.fit, rows_interact=True)


def labelled(rows=12):
    x = torch.randn(rows, 6)
    return x, torch.arange(rows) % 3


@odd(notes="all rows of one class are positives, a row is left out of its own sum by a mask (SupCon)")
def supervised_contrastive():
    def loss_of(model, b):
        x, y = b
        z = F.normalize(model(x), dim=1)
        logits = z @ z.T / 0.5
        logits = logits - logits.max(1, keepdim=True).values.detach()
        others = 1 - torch.eye(len(z), dtype=z.dtype)
        same = (y[:, None] == y[None]).to(z.dtype) * others
        log_p = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
        return -((same * log_p).sum(1) / same.sum(1)).mean()

    return compared(loss_of, labelled())


@odd(notes="each row is to be apart from all others: the label is its own similarity, on the diagonal")
def rows_apart_by_their_own_similarity():
    def loss_of(model, b):
        z = F.normalize(model(b), dim=1)
        return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z))) + 0.1 * z.mean(0).square().sum()

    return compared(loss_of, torch.randn(6, 6))


@odd(notes="correlations of features: a diagonal of 1, all others 0 (Barlow twins)")
def correlations_of_features():
    def loss_of(model, b):
        one, two = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in map(model, b))
        c = one.T @ two / len(one)
        on = (c.diagonal() - 1).square().sum()
        off = c.flatten()[:-1].view(len(c) - 1, len(c) + 1)[:, 1:].square().sum()
        return on + 5e-3 * off

    return compared(loss_of, views())


@odd(notes="a hinge keeps the deviation above 1, squares of covariances are lowered (VICReg)")
def variance_and_covariance():
    def loss_of(model, b):
        one, two = map(model, b)
        total = 25 * F.mse_loss(one, two)
        for z in (one, two):
            total = total + 12.5 * F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean()
            z = z - z.mean(0)
            c = z.T @ z / (len(z) - 1)
            total = total + (c - c.diagonal().diag()).square().sum() / z.shape[1]
        return total

    return compared(loss_of, views())


@odd(notes="minus a cosine with a side that is stopped, in both directions (SimSiam)")
def stopped_cosines():
    model = nn.ModuleDict({"body": relu_mlp(6, 16, 4), "head": relu_mlp(4, 16, 4)})

    def loss_of(_, b):
        z = [model["body"](x) for x in b]
        p = [model["head"](v) for v in z]
        return -0.5 * sum(F.cosine_similarity(p[i], z[1 - i].detach(), dim=1).mean() for i in (0, 1))

    return trained(loss_of, views(), model=model)


@odd(notes="signs of pairs multiply distances, which are to be small for 1: no hinge of scores")
def distances_with_signs():
    def loss_of(model, b):
        one, two, sign = b
        distance = (model(one) - model(two)).norm(dim=1)
        return F.relu(0.5 + sign * (distance - 1.0)).mean()

    a, c = torch.randn(8, 6), torch.randn(8, 6)
    return trained(loss_of, (a, c, 1.0 - 2.0 * (torch.arange(8) % 2)))


@odd(notes="pairs of other classes are pushed apart up to a margin, in the classic contrastive loss")
def classic_contrastive():
    def loss_of(model, b):
        one, two, same = b
        distance = F.pairwise_distance(model(one), model(two))
        return (same * distance.square() + (1 - same) * F.relu(1.5 - distance).square()).mean()

    return trained(loss_of, (torch.randn(8, 6), torch.randn(8, 6), (torch.arange(8) % 2).float()))


@odd(notes="uniformity: the logarithm of the mean of exponentials of negative distances is lowered")
def alignment_and_uniformity():
    def loss_of(model, b):
        one, two = (F.normalize(model(x), dim=1) for x in b)
        spread = sum(torch.pdist(z).square().mul(-2).exp().mean().log() for z in (one, two)) / 2
        return (one - two).square().sum(1).mean() + spread

    return compared(loss_of, views())
