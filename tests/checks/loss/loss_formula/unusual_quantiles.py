"""Quantiles, mixtures and layouts that look wrong to a textbook and are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_formula.faults_likelihoods import regression
from tests.loops.odd import odd


@odd(notes="one side pays, and a square of the outputs bounds the loss")
def bounded_asymmetric_reward():
    def loss_of(out, target):
        error = target - out
        return torch.where(error > 0, 0.7 * error, 0.2 * error).mean() + out.square().mean()

    return regression(loss_of, outputs=2)()


@odd(notes="quantiles by the share less the side, and the median by the absolute error")
def pinball_by_indicator():
    def loss_of(out, target):
        q = torch.tensor([0.2, 0.5], dtype=out.dtype)
        error = target - out
        return (error * (q - (error.detach() < 0).to(out.dtype))).sum(1).mean()

    return regression(loss_of, outputs=2)()


@odd(notes="experts are gated by their shares, and regularised by the entropy of these")
def experts_by_shares():
    def loss_of(out, target):
        weights, values = out[:, :3].softmax(1), out[:, 3:]
        entropy = -(weights * weights.log()).sum(1)
        return ((weights * values).sum(1) - target[:, 0]).square().mean() - 0.01 * entropy.mean()

    return regression(loss_of, outputs=6)()


@odd(notes="as many classes as columns: the rows of an image's scores are the positions of a table of labels")
def square_scores_by_columns():
    x = torch.randn(6, 4, 5)
    labels = torch.randint(0, 4, (6, 4))
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for inputs, label in batches:
            p = model(inputs).softmax(-1).reshape(-1, 4)
            hot = F.one_hot(label.reshape(-1), 4).to(p.dtype)
            optimizer.zero_grad()
            (-(hot * p.log()).sum(1).mean()).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(x, labels), fit=fit)


@odd(notes="mixed labels: one share for the row's own label, the rest for another row's")
def mixed_labels_by_share():
    x = torch.randn(8, 6)
    labels = torch.arange(8) % 3
    share = torch.tensor([0.0, 1.0] * 4)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for inputs, label, weight in batches:
            log_p = model(inputs).log_softmax(1)
            own = log_p.gather(1, label[:, None]).squeeze(1)
            other = log_p.gather(1, label.roll(1)[:, None]).squeeze(1)
            optimizer.zero_grad()
            (-(weight * own + (1 - weight) * other).mean()).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(x, labels, share), fit=fit)


@odd(notes="rows are the frames of one utterance, which have one order of the speakers between them")
def one_order_for_all_frames():
    frames = torch.randn(9, 2, 5)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 10), nn.Unflatten(1, (2, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for mixed, parts in batches:
            out = model(mixed)
            costs = torch.stack([F.mse_loss(out, parts), F.mse_loss(out.flip(1), parts)])
            optimizer.zero_grad()
            costs.min().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(frames.sum(1), frames), fit=fit, rows_interact=True)
