"""Ignored positions that count."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.losses.pairs import pair

CHECK = "ignored_positions"
CLASSES = {"expects": "logits", "num_classes": 4}


def gathered(logits, target):
    return -logits.log_softmax(1).gather(1, target[:, None]).mean()


def gathered_and_masked(logits, target):
    keep = target != -100
    picked = logits.log_softmax(1).gather(1, target.clamp(min=0)[:, None]).squeeze(1)
    return -(picked * keep).sum() / keep.sum().clamp(min=1)


pair(CHECK, "raises", gathered, gathered_and_masked, ignore_index=-100, **CLASSES)


def clamped_only(logits, target):
    return F.cross_entropy(logits, target.clamp(min=0))


pair(CHECK, "not_ignored", clamped_only, gathered_and_masked, ignore_index=-100, **CLASSES)


def padding_counts(logits, target):
    return F.cross_entropy(logits.reshape(-1, 4), target.reshape(-1))


def padding_left_out(logits, target):
    return F.cross_entropy(logits.reshape(-1, 4), target.reshape(-1), ignore_index=0)


TOKENS = {"shape": (3,), "class_dim": -1, "ignore_index": 0}
pair(CHECK, "not_ignored", padding_counts, padding_left_out, **TOKENS, **CLASSES)


class MaskedSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, target, leak):
        keep = target != -1
        ctx.save_for_backward(output, target)
        ctx.leak = leak
        return (((output - target) ** 2) * keep).sum() / keep.sum().clamp(min=1)

    @staticmethod
    def backward(ctx, g):
        output, target = ctx.saved_tensors
        keep = target != -1
        slope = g * 2 * (output - target) / keep.sum().clamp(min=1)
        return slope if ctx.leak else slope * keep, None, None


def leaking(output, target):
    if output.shape != target.shape:
        raise ValueError("shapes differ")
    return MaskedSquares.apply(output, target, True)


def tight(output, target):
    if output.shape != target.shape:
        raise ValueError("shapes differ")
    return MaskedSquares.apply(output, target, False)


pair(CHECK, "gradient_at_ignored", leaking, tight, expects="values", target="value", ignore_index=-1)


def mean_of_all(logits, target):
    return F.cross_entropy(logits, target, reduction="none").mean()


def mean_of_kept(logits, target):
    return F.cross_entropy(logits, target, reduction="none").sum() / (target != -100).sum().clamp(min=1)


pair(CHECK, "counted_in_mean", mean_of_all, mean_of_kept, ignore_index=-100, **CLASSES)


def by_time(logits, target):
    return mean_of_all(logits, target)


pair(
    CHECK,
    "counted_in_mean",
    by_time,
    mean_of_kept,
    ignore_index=-100,
    shape=(3,),
    **CLASSES,
)


def smoothed_over_all(logits, target):
    keep = target != -100
    log_p = logits.log_softmax(1)
    nll = -log_p.gather(1, target.clamp(min=0)[:, None]).squeeze(1)
    return (nll * keep).sum() / keep.sum().clamp(min=1) + 0.1 / keep.float().mean().clamp(min=0.1)


pair(CHECK, "removal_differs", smoothed_over_all, gathered_and_masked, ignore_index=-100, **CLASSES)
