"""Dice, Jaccard and Tversky written by hand."""

from __future__ import annotations

import torch
from torch import nn

from tests.loops.pairs import pair
from tests.loops.plain import loop

EPS = 1.0


def segmentation(loss_of, classes=1):
    """A small convolutional net on masks that follow the brightness of the image."""

    def make():
        images = torch.randn(4, 1, 6, 6)
        masks = (images + 0.3 * torch.randn(4, 1, 6, 6) > 0).to(images.dtype)
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, classes, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return loop(model, (images, masks), lambda model, batch: loss_of(model(batch[0]), batch[1]), optimizer)

    return make


def dice_loss(p, t):
    p, t = p.reshape(-1), t.reshape(-1)
    both = (p * t).sum()
    return 1 - (2.0 * both + EPS) / (p.sum() + t.sum() + EPS)


pair(
    "dice_of_raw_scores",
    "loss_formula",
    "scores_as_probabilities",
    quick=True,
    culprits=("2",),
    where="return 1 - (2.0 * both + EPS)",
    faulty=segmentation(lambda out, mask: dice_loss(out, mask)),
    fixed=segmentation(lambda out, mask: dice_loss(out.sigmoid(), mask)),
)


def soft_iou(p, t):
    both = (p * t).sum((1, 2, 3))
    either = (p + t - p * t).sum((1, 2, 3))
    return ((both + 1e-6) / (either + 1e-6)).mean()


pair(
    "overlap_minimised",
    "loss_formula",
    "sign_flipped",
    quick=True,
    where="return ((both + 1e-6) / (either + 1e-6)).mean()",
    faulty=segmentation(lambda out, mask: soft_iou(out.sigmoid(), mask)),
    fixed=segmentation(lambda out, mask: 1 - soft_iou(out.sigmoid(), mask)),
)


def dice_by_rows(factor):
    def loss_of(out, mask):
        p, t = out.sigmoid().flatten(1), mask.flatten(1)
        both = factor * (p * t).sum(1) + EPS
        return (1 - both / (p.sum(1) + t.sum(1) + EPS)).mean()

    return loss_of


pair(
    "dice_without_its_factor",
    "loss_formula",
    "factor_missing",
    level="advice",
    quick=True,
    mentions=("0.5",),
    faulty=segmentation(dice_by_rows(1)),
    fixed=segmentation(dice_by_rows(2)),
)


pair(
    "sigmoid_in_the_model_and_in_the_loss",
    "loss_formula",
    "probabilities_as_scores",
    quick=True,
    faulty=segmentation(lambda out, mask: dice_loss(out.sigmoid().sigmoid(), mask)),
    fixed=segmentation(lambda out, mask: dice_loss(out.sigmoid(), mask)),
)


def dice_where_known(out, mask, squash):
    p, t, known = squash(out).flatten(1), mask.flatten(1), (mask > -1).to(out.dtype).flatten(1)
    both = (p * t * known).sum(1)
    return (1 - (2 * both + 1) / ((p * known).sum(1) + (t * known).sum(1) + 1)).mean()


pair(
    "dice_of_raw_scores_where_labels_are_known",
    "loss_formula",
    "scores_as_probabilities",
    faulty=segmentation(lambda out, mask: dice_where_known(out, mask, lambda z: z)),
    fixed=segmentation(lambda out, mask: dice_where_known(out, mask, torch.sigmoid)),
)
