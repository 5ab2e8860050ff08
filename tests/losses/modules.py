"""Every loss module of torch.nn that a contract can describe, used right.

CTCLoss takes lengths beside outputs and targets, MultiLabelMarginLoss a list of classes that ends with -1, and
AdaptiveLogSoftmaxWithLoss is a layer: no contract describes them.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from pytest_trainloop import LossContract

COUNTS = (0.0, math.inf)


def _contract(criterion, expects, target, **more):
    return LossContract(criterion=criterion, expects=expects, target=target, **more)


def _gaussian(output, target):
    return nn.GaussianNLLLoss()(output[:, 0], target, nn.functional.softplus(output[:, 1]))


def _ranking(first, second, label):
    return nn.MarginRankingLoss(margin=0.5)(first, second, label)


CLASSES = {"num_classes": 4}
MODULES: dict[str, LossContract] = {
    "L1Loss": _contract(nn.L1Loss(), "values", "value"),
    "MSELoss": _contract(nn.MSELoss(), "values", "value", shape=(2,)),
    "CrossEntropyLoss": _contract(nn.CrossEntropyLoss(), "logits", "index", ignore_index=-100, **CLASSES),
    "CrossEntropyLoss-weighted": _contract(
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0, 4.0]), label_smoothing=0.1),
        "logits",
        "index",
        ignore_index=-100,
        shape=(3,),
        **CLASSES,
    ),
    "CrossEntropyLoss-soft": _contract(nn.CrossEntropyLoss(label_smoothing=0.1), "logits", "distribution", **CLASSES),
    "CrossEntropyLoss-sum": _contract(nn.CrossEntropyLoss(reduction="sum"), "logits", "index", **CLASSES),
    "CrossEntropyLoss-none": _contract(nn.CrossEntropyLoss(reduction="none"), "logits", "index", **CLASSES),
    "NLLLoss": _contract(nn.NLLLoss(ignore_index=0), "log_probabilities", "index", ignore_index=0, **CLASSES),
    "PoissonNLLLoss": _contract(nn.PoissonNLLLoss(full=True), "values", "value", target_range=COUNTS),
    "PoissonNLLLoss-rates": _contract(
        nn.PoissonNLLLoss(log_input=False), "values", "value", target_range=COUNTS, output_range=COUNTS
    ),
    "GaussianNLLLoss": _contract(_gaussian, "values", "value", num_outputs=2),
    "KLDivLoss": _contract(nn.KLDivLoss(reduction="batchmean"), "log_probabilities", "distribution", **CLASSES),
    "KLDivLoss-log": _contract(nn.KLDivLoss(reduction="sum", log_target=True), "log_probabilities", "pair", **CLASSES),
    "BCELoss": _contract(nn.BCELoss(), "probabilities", "binary", shape=(2,)),
    "BCEWithLogitsLoss": _contract(nn.BCEWithLogitsLoss(), "logits", "binary"),
    "BCEWithLogitsLoss-weighted": _contract(
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 1.0, 2.0, 4.0])), "logits", "binary", **CLASSES
    ),
    "MarginRankingLoss": _contract(_ranking, "values", "binary", labels=(-1, 1), views=2),
    "HingeEmbeddingLoss": _contract(nn.HingeEmbeddingLoss(), "values", "binary", labels=(-1, 1), shape=(2,)),
    "HuberLoss": _contract(nn.HuberLoss(), "values", "value"),
    "SmoothL1Loss": _contract(nn.SmoothL1Loss(beta=0.5), "values", "value"),
    "SoftMarginLoss": _contract(nn.SoftMarginLoss(), "logits", "binary", labels=(-1, 1), shape=(2,)),
    "MultiLabelSoftMarginLoss": _contract(nn.MultiLabelSoftMarginLoss(), "logits", "binary", **CLASSES),
    "CosineEmbeddingLoss": _contract(nn.CosineEmbeddingLoss(), "embeddings", "binary", labels=(-1, 1)),
    "MultiMarginLoss": _contract(nn.MultiMarginLoss(), "logits", "index", **CLASSES),
    "TripletMarginLoss": _contract(nn.TripletMarginLoss(), "embeddings", "pair", views=3),
    "TripletMarginWithDistanceLoss": _contract(nn.TripletMarginWithDistanceLoss(), "embeddings", "pair", views=3),
}
