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
