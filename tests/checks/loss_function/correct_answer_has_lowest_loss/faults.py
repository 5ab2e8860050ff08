"""Losses whose cheapest answer is not the correct one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.losses.pairs import pair

CHECK = "correct_answer_has_lowest_loss"
CLASSES = {"expects": "logits", "num_classes": 4}


def minus_lost(logits, target):
    return logits.log_softmax(1)[torch.arange(len(logits)), target].mean()


def negative_log_likelihood(logits, target):
    return F.nll_loss(logits.log_softmax(1), target)


pair(CHECK, "reversed", minus_lost, negative_log_likelihood, **CLASSES)


def similarity_as_loss(a, b):
    return F.cosine_similarity(a, b).mean()


def dissimilarity(a, b):
    return 1 - F.cosine_similarity(a, b).mean()


pair(CHECK, "reversed", similarity_as_loss, dissimilarity, expects="embeddings", target="pair")


def dice_coefficient(p, target):
    return (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def dice_loss(p, target):
    return 1 - dice_coefficient(p, target)


pair(CHECK, "reversed", dice_coefficient, dice_loss, expects="probabilities", target="binary", shape=(3, 3))


def labels_from_one(logits, target):
    return F.cross_entropy(logits, (target - 1) % 4)


pair(CHECK, "other_class", labels_from_one, F.cross_entropy, **CLASSES)


def predicted_class(logits, target):
    return F.cross_entropy(logits, logits.argmax(1))


pair(CHECK, "target_unused", predicted_class, F.cross_entropy, **CLASSES)


def size_only(output, target):
    return output.square().mean()


pair(CHECK, "target_unused", size_only, F.mse_loss, expects="values", target="value")


def column_against_row(output, target):
    return (output - target).square().mean()


def row_against_row(output, target):
    return (output.squeeze(1) - target).square().mean()


pair(CHECK, "rows_not_matched", column_against_row, row_against_row, expects="values", target="value", num_outputs=1)


def every_pair(output, target):
    return ((output[:, None] - target[None]) ** 2).mean()


def each_with_its_own(output, target):
    return F.mse_loss(output, target)


pair(CHECK, "rows_not_matched", every_pair, each_with_its_own, expects="values", target="value")


def first_view_with_itself(a, b):
    return (1 - F.cosine_similarity(a, a.roll(1, 0))).mean()


def first_view_with_second(a, b):
    return (1 - F.cosine_similarity(a, b)).mean()


pair(CHECK, "target_unused", first_view_with_itself, first_view_with_second, expects="embeddings", target="pair")
