"""Right losses of several terms that need not all grow alike with the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.odd import odd


def classifier(loss, **fields):
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def step(batch):
        optimizer.zero_grad()
        loss(net, *batch).backward()
        optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=data.labelled(rows=12), step=step, **fields)


@odd(notes="a summed error and a penalty on weights, which no row has a share in")
def summed_errors_and_a_penalty_on_weights():
    def loss(net, x, y):
        penalty = sum(p.square().sum() for p in net.parameters())
        return F.cross_entropy(net(x), y, reduction="sum") / 12 + 1e-3 * penalty

    return classifier(loss)


@odd(notes="two sums over rows with different constants below them")
def two_sums_over_rows():
    def loss(net, x, y):
        out = net(x)
        return F.cross_entropy(out, y, reduction="sum") / 12 + out.square().sum() / 400

    return classifier(loss)


@odd(notes="a sum divided by a count of the batch, beside a mean")
def a_sum_by_its_count_beside_a_mean():
    def loss(net, x, y):
        out, known = net(x), (y > 0).float()
        return F.cross_entropy(out, y) + 0.01 * (out.square().sum(1) * known).sum() / known.sum().clamp(min=1)

    return classifier(loss)


@odd(notes="shares of experts are multiplied: their term is a product of means over rows")
def a_balance_of_experts_beside_a_mean():
    def loss(net, x, y):
        out = net(x)
        shares = out.softmax(1).mean(0)
        return F.cross_entropy(out, y) + 0.01 * 3 * shares.square().sum()

    return classifier(loss)


@odd(notes="the spread over rows divides by one less than their number, so that twice the rows change it")
def an_unbiased_spread_beside_a_mean():
    def loss(net, x, y):
        out = net(x)
        return F.cross_entropy(out, y) + 0.1 * F.relu(1 - out.std(dim=0)).mean()

    return classifier(loss, rows_interact=True)


@odd(notes="the pairs of all rows are summed, beside a mean over rows")
def sums_over_pairs_beside_a_mean():
    def loss(net, x, y):
        out = net(x)
        return F.cross_entropy(out, y) + 1e-4 * torch.cdist(out, out).square().sum()

    return classifier(loss, rows_interact=True)


@odd(notes="the root of a mean error beside a mean")
def a_root_of_a_mean_beside_a_mean():
    def loss(net, x, y):
        out = net(x)
        return F.cross_entropy(out, y) + 0.1 * (out - x[:, :3]).square().mean().sqrt()

    return classifier(loss)


def accumulating(loss, **fields):
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def fit(batches):
        for number, (x, y) in enumerate(batches, start=1):
            loss(net, x, y).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=net, optimizer=optimizer, batch=partly_labelled(), fit=fit, **fields)


def partly_labelled():
    x, y = data.labelled(rows=12)
    return x, torch.stack([y, y.where(torch.arange(12) % 3 > 0, -100)], dim=1)


@odd(notes="windows of four in the loop itself; what is ignored is in the sum as 0, over a constant number")
def four_micro_batches_by_a_constant():
    def loss(net, x, y):
        out = net(x).unsqueeze(1).expand(-1, 2, -1)
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum") / 96

    return accumulating(loss)


@odd(notes="windows of four in the loop itself, not divided: the learning rate is set for the sum")
def four_micro_batches_added_up():
    def loss(net, x, y):
        return F.cross_entropy(net(x), y[:, 0])

    return accumulating(loss)


@odd(notes="windows of four in the loop itself: every row is averaged over its own labels, and then the rows")
def four_micro_batches_of_means_by_row():
    def loss(net, x, y):
        out = net(x).unsqueeze(1).expand(-1, 2, -1)
        losses = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
        return (losses.sum(1) / (y != -100).sum(1)).mean() / 4

    return accumulating(loss)


@odd(notes="weights of rows add up to 1, and what they weigh is summed")
def rows_weighed_by_a_softmax_over_the_batch():
    def loss(net, x, y):
        weight = x.sum(1).softmax(0)
        return (weight * F.cross_entropy(net(x), y, reduction="none")).sum()

    return classifier(loss, rows_interact=True)


@odd(notes="a sum over pairs of rows is divided by the square of their number")
def a_mean_over_pairs_of_rows():
    def loss(net, x, y):
        out = net(x)
        wrong = F.softplus((out[:, None] - out[None]).square().sum(-1) * (2.0 * (y[:, None] == y) - 1))
        return wrong.sum() / len(x) / len(x)

    return classifier(loss, rows_interact=True)


@odd(notes="a constant number of rows divides the mean")
def a_mean_divided_by_a_constant():
    return classifier(lambda net, x, y: F.cross_entropy(net(x), y, reduction="none").mean() / 12)


@odd(notes="a penalty on weights is divided by the rows beside their mean, as a prior by the data")
def a_prior_by_the_number_of_rows():
    def loss(net, x, y):
        prior = sum(p.square().sum() for p in net.parameters())
        return F.cross_entropy(net(x), y, reduction="none").mean() + 1e-2 * prior / len(x)

    return classifier(loss)
