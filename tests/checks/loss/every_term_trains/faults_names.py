"""Terms whose weights go by another name."""

from __future__ import annotations

import torch.nn.functional as F

from tests.checks.loss.every_term_trains.faults import CHECK, loop, overlap
from tests.loops.pairs import pair


def weighted(weights):
    def loss_of(model, x, y):
        scores = model(x)
        losses = {
            "loss_ce": F.cross_entropy(scores, y),
            "loss_giou": overlap(scores.softmax(-1), y),
            "loss_size": scores.square().mean(),
        }
        return sum(weights.get(name, 0.0) * value for name, value in losses.items())

    return loop(loss_of)


def filtered(weights):
    def loss_of(model, x, y):
        scores = model(x)
        losses = {"loss_ce": F.cross_entropy(scores, y), "loss_boxes": overlap(scores.softmax(-1), y)}
        return sum(losses[name] * weights[name] for name in losses if name in weights)

    return loop(loss_of)


pair(
    "weight_that_is_looked_up_by_another_name",
    CHECK,
    "weight_of_another_name",
    culprits=("loss_giou",),
    quick=True,
    faulty=weighted({"loss_ce": 1.0, "giou": 0.5, "loss_size": 0.01}),
    fixed=weighted({"loss_ce": 1.0, "loss_giou": 0.5, "loss_size": 0.01}),
)
pair(
    "term_filtered_out_by_the_names_of_the_weights",
    CHECK,
    "weight_of_another_name",
    culprits=("loss_boxes",),
    faulty=filtered({"loss_ce": 1.0, "loss_box": 0.5}),
    fixed=filtered({"loss_ce": 1.0, "loss_boxes": 0.5}),
)
