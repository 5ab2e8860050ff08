"""Two terms of one loss that read the same outputs as different quantities."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.checks.loss.loss_formula.faults_distances import regression
from tests.checks.loss.loss_formula.faults_segmentation import segmentation
from tests.loops.pairs import pair


def dice_with_squares(x, t):
    """https://github.com/ScrollPrize/villa/pull/1644: the loss is built without its sigmoid."""
    both, all_of_them = (x * t).sum((2, 3)), x.square().sum((2, 3)) + t.square().sum((2, 3))
    return 1 - ((2 * both + 1) / (all_of_them + 1)).mean()


def with_dice(nonlinearity):
    return segmentation(
        lambda out, t: 0.5 * F.binary_cross_entropy_with_logits(out, t) + dice_with_squares(nonlinearity(out), t)
    )


pair(
    "raw_scores_in_dice_next_to_a_cross_entropy",
    "loss_formula",
    "terms_disagree",
    quick=True,
    culprits=("2",),
    where="return 1 - ((2 * both + 1) / (all_of_them + 1)).mean()",
    faulty=with_dice(lambda out: out),
    fixed=with_dice(torch.sigmoid),
)


def depths(read):
    """https://github.com/FilippoAleotti/mobilePydnet/issues/21: one term reads logarithms of depths, another depths."""

    def loss_of(out, y):
        depth = 2.0 * torch.exp(0.3 * y)
        return F.mse_loss(out, depth.log()) + 0.5 * F.l1_loss(read(out), depth)

    return regression(loss_of)


pair(
    "logarithms_of_depths_read_as_depths",
    "loss_formula",
    "terms_disagree",
    where="0.5 * F.l1_loss(read(out), depth)",
    faulty=depths(lambda out: out),
    fixed=depths(torch.exp),
)
