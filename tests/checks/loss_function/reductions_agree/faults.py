"""Reductions that do not agree, and rows whose order matters."""

from __future__ import annotations

import torch.nn.functional as F

from tests.losses.pairs import pair

CHECK = "reductions_agree"
VALUES = {"expects": "values", "target": "value", "shape": (2,)}


def each(output, target):
    return (output - target).square().mean(1)


def reduced(output, target, reduction="mean"):
    loss = each(output, target)
    return {"none": loss, "sum": loss.sum(), "mean": loss.mean()}[reduction]


def keyword_unread(output, target, reduction="mean"):
    return each(output, target).sum()


def none_forgotten(output, target, reduction="mean"):
    loss = each(output, target)
    return loss.sum() if reduction == "sum" else loss.mean()


def sum_of_entries(output, target, reduction="mean"):
    loss = each(output, target)
    return (output - target).square().sum() if reduction == "sum" else loss if reduction == "none" else loss.mean()


def mean_that_sums(output, target, reduction="mean"):
    loss = each(output, target)
    return loss if reduction == "none" else loss.sum()


def mean_by_size_of_output(output, target, reduction="mean"):
    loss = each(output, target)
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / output.abs().sum()}[reduction]


pair(CHECK, "reduction_ignored", keyword_unread, reduced, **VALUES)
pair(CHECK, "none_is_reduced", none_forgotten, reduced, **VALUES)
pair(CHECK, "sum_is_not_the_sum", sum_of_entries, reduced, **VALUES)
pair(CHECK, "mean_is_a_sum", mean_that_sums, reduced, **VALUES)
pair(CHECK, "mean_is_no_mean", mean_by_size_of_output, reduced, level="advice", **VALUES)


def always_one_number(output, target):
    return each(output, target).mean()


def by_row(output, target):
    return each(output, target)


def summed(output, target):
    return each(output, target).sum()


pair(CHECK, "none_is_reduced", always_one_number, by_row, reduction="none", **VALUES)
pair(CHECK, "not_reduced", by_row, always_one_number, reduction="mean", **VALUES)
pair(CHECK, "sum_is_a_mean", always_one_number, summed, reduction="sum", **VALUES)
pair(CHECK, "mean_is_a_sum", summed, always_one_number, reduction="mean", **VALUES)


def summed_unsaid(output, target):
    return summed(output, target)


pair(CHECK, "mean_is_a_sum", summed_unsaid, always_one_number, level="advice", **VALUES)


def last_row_weighs_more(logits, target):
    loss = F.cross_entropy(logits, target, reduction="none")
    return (loss * loss.new_tensor(range(1, len(loss) + 1))).mean()


def running_mean(logits, target):
    total = 0.0
    for i, one in enumerate(F.cross_entropy(logits, target, reduction="none")):
        total = (total + one) / (1 if i == 0 else 2)
    return total


CLASSES = {"expects": "logits", "num_classes": 3}
pair(CHECK, "order_matters", last_row_weighs_more, F.cross_entropy, **CLASSES)
pair(CHECK, "order_matters", running_mean, F.cross_entropy, **CLASSES)


def by_row_unsaid(output, target):
    return by_row(output, target)


def keyword_not_read(output, target, reduction="mean"):
    return ((output - target) ** 2).mean()


def keyword_read(output, target, reduction="mean"):
    return F.mse_loss(output, target, reduction=reduction)


pair(CHECK, "not_reduced", by_row_unsaid, always_one_number, level="advice", **VALUES)
pair(CHECK, "reduction_ignored", keyword_not_read, keyword_read, **VALUES)
