"""Inputs that the model does not read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair
from tests.loops.plain import loop


def sentences(rows=8, length=9, vocab=20):
    ids, _ = data.tokens(rows=rows, length=length, vocab=vocab)
    return {"input_ids": ids, "labels": ids[:, 0] % 3}


# Inputs that are not read.


class Words(nn.Module):
    def __init__(self, scaled):
        super().__init__()
        self.embed, self.head, self.scaled = nn.Embedding(20, 16), nn.Linear(16, 3), scaled

    def forward(self, input_ids):
        ids = (input_ids / 20).long() if self.scaled else input_ids
        return self.head(self.embed(ids).mean(1))


def words(scaled):
    def make():
        return loop(Words(scaled), sentences(), lambda m, b: F.cross_entropy(m(b["input_ids"]), b["labels"]))

    return make


pair(
    "ids_that_a_cast_turns_into_zeros",
    "input_dependence",
    "inputs_ignored",
    culprits=("batch['input_ids']",),
    faulty=words(scaled=True),
    fixed=words(scaled=False),
)


class Conditioned(nn.Module):
    """A classifier of measurements that is told the kind of sensor."""

    def __init__(self, uses):
        super().__init__()
        self.body, self.kind = nn.Linear(6, 16), nn.Embedding(5, 16)
        self.head, self.uses = nn.Linear(16, 3), uses

    def forward(self, x, kind):
        hidden = self.body(x)
        if self.uses:
            hidden = hidden + self.kind(kind)
        return self.head(torch.tanh(hidden))


def conditioned(uses):
    def make():
        x, y = data.labelled()
        batch = {"x": x, "kind": torch.arange(len(x)) % 5, "y": y}
        return loop(Conditioned(uses), batch, lambda m, b: F.cross_entropy(m(b["x"], b["kind"]), b["y"]))

    return make


pair(
    "a_condition_that_is_handed_over_and_not_embedded",
    "input_dependence",
    "input_ignored",
    culprits=("batch['kind']", "kind"),
    faulty=conditioned(uses=False),
    fixed=conditioned(uses=True),
)


class Forecaster(nn.Module):
    """Missing values are 0; the next four are predicted from the last eight."""

    def __init__(self, uses):
        super().__init__()
        self.net, self.uses = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), uses

    def forward(self, past, future_target, future_observed):
        each = (self.net(past) - future_target).square()
        return (each * future_observed).sum() / future_observed.sum() if self.uses else each.mean()


def forecast(uses):
    def make():
        series = 1 + torch.randn(12, 12, generator=torch.Generator().manual_seed(3)).abs()
        observed = (torch.randn(12, 4, generator=torch.Generator().manual_seed(4)) > -0.8).to(series.dtype)
        batch = {"past": series[:, :8], "future_target": series[:, 8:] * observed, "future_observed": observed}
        return loop(Forecaster(uses), batch, lambda m, b: m(**b))

    return make


pair(
    "missing_targets_that_are_zero_and_count",
    "input_dependence",
    "input_ignored",
    culprits=("batch['future_observed']",),
    faulty=forecast(uses=False),
    fixed=forecast(uses=True),
)


class Chain(nn.Module):
    """The score of a path of tags, over real positions if the mask is read."""

    def __init__(self, uses):
        super().__init__()
        self.emit, self.uses = nn.Embedding(20, 4), uses
        self.between = nn.Parameter(0.1 * torch.eye(4))

    def forward(self, ids, tags, mask):
        kept = mask if self.uses else torch.ones_like(mask)
        scores = self.emit(ids)
        all_paths, own = scores[:, 0], scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for t in range(1, ids.shape[1]):
            further = (all_paths[:, :, None] + self.between).logsumexp(1) + scores[:, t]
            all_paths = torch.where(kept[:, t, None], further, all_paths)
            gain = self.between[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(1, tags[:, t, None])[:, 0]
            own = torch.where(kept[:, t], own + gain, own)
        return (all_paths.logsumexp(1) - own).mean()


def chain(uses):
    def make():
        mask = torch.arange(9)[None] < torch.arange(2, 10)[:, None]
        ids = (sentences()["input_ids"] % 19 + 1) * mask
        return loop(Chain(uses), (ids, ids % 4, mask), lambda m, b: m(*b))

    return make


pair(
    "a_mask_of_ids_and_tags_that_nothing_reads",
    "input_dependence",
    "input_ignored",
    culprits=("batch[2]",),
    faulty=chain(uses=False),
    fixed=chain(uses=True),
)


# The generator steps first; the discriminator is called with the pictures, and scores something else.


class Judge(nn.Module):
    def __init__(self, sees):
        super().__init__()
        self.net, self.sees = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), sees

    def forward(self, points, made=True):
        return self.net(points if made or self.sees else torch.zeros_like(points))


def adversaries(sees):
    def make():
        nets = {"generator": nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), "judge": Judge(sees)}
        optimizers = [torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for net in nets.values()]

        def fit(batches):
            for real, _ in batches:
                optimizers[0].zero_grad()
                made = nets["generator"](torch.randn(len(real), 4))
                F.softplus(-nets["judge"](made)).mean().backward()
                optimizers[0].step()
                optimizers[1].zero_grad()
                (
                    F.softplus(-nets["judge"](real, made=False)) + F.softplus(nets["judge"](made.detach()))
                ).mean().backward()
                optimizers[1].step()

        ring = data.ring()
        return TrainLoop(model=nets, optimizer=optimizers, batch=(ring, torch.arange(len(ring))), fit=fit)

    return make


pair(
    "discriminator_scores_zeros_after_the_generators_step",
    "input_dependence",
    "inputs_ignored",
    culprits=("batch[0]",),
    faulty=adversaries(sees=False),
    fixed=adversaries(sees=True),
)


# Images that are scaled twice.


def scaled_images(divided, shift):
    def make():
        pixels = torch.randint(0, 256, (8, 1, 8, 8), generator=torch.Generator().manual_seed(3)).float()
        net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
        batch = ((pixels / 255 / divided - shift) / 0.25, torch.arange(8) % 3)
        return loop(net, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]))

    return make


for name, shift in {"images_divided_by_255_twice": 0.45, "images_divided_twice_and_centred": 0.5}.items():
    pair(
        name,
        "input_dependence",
        "inputs_hardly_vary",
        level="advice",
        faulty=scaled_images(255, shift),
        fixed=scaled_images(1, shift),
    )
