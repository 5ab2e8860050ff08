"""Losses that half precision breaks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.losses.pairs import pair

CHECK = "precisions_agree"


def eps_that_half_has_not(logits, target):
    p = (logits * 8).sigmoid()
    return -(target * (p + 1e-8).log() + (1 - target) * (1 - p + 1e-8).log()).mean()


def with_logits(logits, target):
    return F.binary_cross_entropy_with_logits(logits * 8, target)


pair(CHECK, "not_finite", eps_that_half_has_not, with_logits, expects="logits", target="binary", shape=(2,))


def variance_by_moments(output, target):
    away = output - target + 300.0
    return (away.square().mean(1) - away.mean(1).square()).mean()


def variance(output, target):
    return (output - target).var(1, unbiased=False).mean()


pair(CHECK, "out_of_range", variance_by_moments, variance, level="advice", expects="values", target="value", shape=(4,))


def far_tail(logits, target):
    p = (logits * 4).sigmoid()
    return -(1 - torch.where(target > 0.5, 1 - p, p)).clamp(min=1e-7).log().mean()


def far_tail_by_logits(logits, target):
    return F.binary_cross_entropy_with_logits(logits * 4, target)


pair(CHECK, "loses_digits", far_tail, far_tail_by_logits, expects="logits", target="binary", shape=(2,))


def cosine_scores(a, b, stable):
    scores = F.normalize(a) @ F.normalize(b).T * 64
    if stable:
        return F.cross_entropy(scores, torch.arange(len(a)))
    return -(scores.exp().diagonal() / scores.exp().sum(1)).log().mean()


def contrast_by_exponentials(a, b):
    return cosine_scores(a, b, stable=False)


def contrast(a, b):
    return cosine_scores(a, b, stable=True)


pair(
    CHECK,
    "not_finite",
    contrast_by_exponentials,
    contrast,
    expects="embeddings",
    target="pair",
)
