"""Losses of several terms, of which one is a sum over rows and another a mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


class VAE(nn.Module):
    def __init__(self, features: int = 6, code: int = 3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 24), nn.Tanh(), nn.Linear(24, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, 24), nn.Tanh(), nn.Linear(24, features))

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        code = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(code), mu, logvar


# A variational autoencoder: the reconstruction became a mean, and the divergence stayed the sum of the example.


def summed_divergence(mu, logvar):
    return -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def mean_divergence(mu, logvar):
    return -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()


def autoencoder(divergence, *, knob=True):
    def make(accumulate=1):
        model = VAE()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            model.train()
            for i, (x, _) in enumerate(batches, start=1):
                decoded, mu, logvar = model(x)
                loss = F.mse_loss(decoded, x) + 1e-3 * divergence(mu, logvar)
                (loss / accumulate).backward()
                if i % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(rows=24), fit=fit)

    return make if knob else lambda: make()


pair(
    "divergence_summed_beside_a_mean_error_accumulated",
    "accumulation_equivalence",
    "term_grows_with_rows",
    culprits=("sum",),
    where="return -0.5 * torch.sum",
    faulty=autoencoder(summed_divergence),
    fixed=autoencoder(mean_divergence),
    quick=True,
)


# A detector: every box counts in the sum of its errors, and the score of what it shows is a mean.


def detector(regression):
    def make():
        trunk, score, box = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 4)
        model = nn.ModuleDict({"trunk": trunk, "score": score, "box": box})
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def step(batch):
            x, labels, boxes = batch
            shown = torch.tanh(trunk(x))
            loss = F.cross_entropy(score(shown), labels) + 0.1 * regression(box(shown), boxes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        x, labels = data.labelled(rows=12)
        boxes = torch.stack([x[:, 0], x[:, 1], x[:, 0] - x[:, 2], x[:, 3]], dim=1)
        return TrainLoop(model=model, optimizer=optimizer, batch=(x, labels, boxes), step=step)

    return make


def summed_boxes(given, wanted):
    return F.smooth_l1_loss(given, wanted, reduction="sum")


def mean_boxes(given, wanted):
    return F.smooth_l1_loss(given, wanted, reduction="none").sum(1).mean()


pair(
    "boxes_summed_beside_a_mean_score",
    "accumulation_equivalence",
    "term_grows_with_rows",
    culprits=("smooth_l1_loss",),
    where='reduction="sum"',
    level="advice",
    faulty=detector(summed_boxes),
    fixed=detector(mean_boxes),
)


# A ranking of pairs: their mean is divided by their number once more, with the penalty that is to be divided.


def ranked(loss_of):
    def make():
        tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(2))
        optimizer = torch.optim.Adam(tables.parameters(), lr=1e-2)

        def step(batch):
            user, liked, other = tables[0](batch[0]), tables[1](batch[1]), tables[1](batch[2])
            margin = (user * (liked - other)).sum(-1)
            optimizer.zero_grad()
            loss_of(margin, user.square().sum() + liked.square().sum()).backward()
            optimizer.step()

        batch = torch.arange(12), torch.arange(12) // 2, 19 - torch.arange(12) // 3
        return TrainLoop(model=tables, optimizer=optimizer, batch=batch, step=step)

    return make


pair(
    "mean_of_ranked_pairs_by_their_number",
    "accumulation_equivalence",
    "divided_by_rows_again",
    culprits=("div",),
    where="/ margin.numel()",
    level="advice",
    faulty=ranked(lambda margin, size: -F.logsigmoid(margin).mean() / margin.numel()),
    fixed=ranked(lambda margin, size: -F.logsigmoid(margin).mean() + 1e-3 * size / margin.numel()),
)


def regression(divided):
    def make():
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                errors = F.smooth_l1_loss(net(x), y, reduction="none")
                loss = torch.mean(errors)
                if divided:
                    loss = loss / x.shape[0]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=net, optimizer=optimizer, batch=data.table(rows=12), fit=fit)

    return make


pair(
    "mean_error_by_the_size_of_the_batch",
    "accumulation_equivalence",
    "divided_by_rows_again",
    where="loss / x.shape[0]",
    level="advice",
    faulty=regression(divided=True),
    fixed=regression(divided=False),
)
