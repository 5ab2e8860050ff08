"""Losses that accept invalid targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.losses.pairs import pair

CHECK = "invalid_target_raises"
CLASSES = {"expects": "logits", "num_classes": 4}


def huber(output, target):
    away = (output - target).abs()
    return torch.where(away < 1, 0.5 * away**2, away - 0.5).mean()


def huber_checked(output, target):
    if output.shape != target.shape:
        raise ValueError(f"output {tuple(output.shape)} against target {tuple(target.shape)}")
    return huber(output, target)


def binary_by_hand(logits, target):
    return (F.softplus(logits) - logits * target).mean()


def binary_checked(logits, target):
    if logits.shape != target.shape:
        raise ValueError(f"logits {tuple(logits.shape)} against target {tuple(target.shape)}")
    return binary_by_hand(logits, target)


pair(CHECK, "broadcasts", huber, huber_checked, level="advice", expects="values", target="value")
pair(CHECK, "broadcasts", binary_by_hand, binary_checked, level="advice", expects="logits", target="binary")


def gathers_what_there_is(logits, target):
    return -logits.log_softmax(1).gather(1, target[:, None]).mean()


def wraps_round(logits, target):
    return -logits.log_softmax(1)[torch.arange(len(logits)), target].mean()


def one_hot_by_comparison(logits, target):
    if len(logits) != len(target) or not 0 <= target.min() <= target.max() < 4:
        raise ValueError("classes from 0 to 3 are needed, one for each row")
    hot = target[:, None] == torch.arange(logits.shape[1])
    return -(hot * logits.log_softmax(1)).sum(1).mean()


def one_hot_checked(logits, target):
    if target.dtype != torch.long:
        raise ValueError("class indices are needed")
    return one_hot_by_comparison(logits, target)


pair(CHECK, "rows_unchecked", gathers_what_there_is, F.cross_entropy, level="advice", **CLASSES)
pair(CHECK, "range_unchecked", wraps_round, F.cross_entropy, level="advice", **CLASSES)
pair(CHECK, "dtype_unchecked", one_hot_by_comparison, one_hot_checked, level="advice", **CLASSES)
