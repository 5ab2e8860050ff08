"""Differences and products of predictions and targets written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def regression(loss_of):
    def make():
        features = torch.randn(10, 5)
        targets = features @ torch.randn(5, 2) + 0.1 * torch.randn(10, 2)
        model = mlp(5, 16, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return loop(model, (features, targets), lambda model, batch: loss_of(model(batch[0]), batch[1]), optimizer)

    return make


def square_of_the_mean(p, t):
    return (p - t).mean() ** 2


pair(
    "square_of_the_mean_error",
    "loss_formula",
    "errors_cancel",
    quick=True,
    where="return (p - t).mean() ** 2",
    faulty=regression(square_of_the_mean),
    fixed=regression(lambda p, t: ((p - t) ** 2).mean()),
)


def segmenter(loss_of):
    def make():
        images = torch.randn(4, 1, 6, 6)
        classes = (images[:, 0] > 0).long() + (images[:, 0] > 1).long()
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return loop(model, (images, classes), lambda model, batch: loss_of(model(batch[0]), batch[1]), optimizer)

    return make


def dice_over_classes(scores, labels, first=False):
    p = scores.softmax(1)
    t = F.one_hot(labels, 3).to(p.dtype)
    t = t.permute(0, 3, 1, 2) if first else t
    p, t = p.reshape(-1), t.reshape(-1)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


pair(
    "one_hot_flattened_with_classes_last",
    "loss_formula",
    "entries_misaligned",
    quick=True,
    faulty=segmenter(dice_over_classes),
    fixed=segmenter(lambda s, y: dice_over_classes(s, y, first=True)),
)


def dice_of_shares(scores, labels, axis=1):
    p = scores.softmax(axis)
    t = F.one_hot(labels, 3).permute(0, 3, 1, 2).to(p.dtype)
    both, all_of_them = (p * t).sum((0, 2, 3)), (p + t).sum((0, 2, 3))
    return 1 - ((2 * both + 1) / (all_of_them + 1)).mean()


pair(
    "softmax_over_the_columns",
    "loss_formula",
    "wrong_axes",
    quick=True,
    faulty=segmenter(lambda s, y: dice_of_shares(s, y, axis=-1)),
    fixed=segmenter(dice_of_shares),
)
