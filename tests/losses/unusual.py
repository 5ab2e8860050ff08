"""Odd but correct losses: each breaks some textbook rule about losses, none has a fault."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import LossContract

ODD: dict[str, LossContract] = {}


def odd(**contract: Any) -> Any:
    """Register a loss with its contract."""

    def register(criterion: Any) -> Any:
        made = criterion() if isinstance(criterion, type) else criterion
        ODD[criterion.__name__] = LossContract(criterion=made, **contract)
        return criterion

    return register


def same_shape(output: torch.Tensor, target: torch.Tensor) -> None:
    if output.shape != target.shape:
        raise ValueError(f"output {tuple(output.shape)} against target {tuple(target.shape)}")


@odd(expects="logits", num_classes=4, ignore_index=-100)
class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, ignore_index=-100, reduction="mean"):
        super().__init__()
        self.gamma, self.ignore_index, self.reduction = gamma, ignore_index, reduction

    def forward(self, logits, target):
        kept = target != self.ignore_index
        logp = F.log_softmax(logits, dim=1).gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
        each = -((1 - logp.exp()) ** self.gamma) * logp * kept
        if self.reduction == "none":
            return each
        return each.sum() if self.reduction == "sum" else each.sum() / kept.sum().clamp(min=1)


@odd(expects="logits", num_classes=4)
def focal_with_detached_weight(logits, target):
    ce = F.cross_entropy(logits, target, reduction="none")
    return ((1 - (-ce).exp()).detach() ** 2 * ce).mean()


@odd(expects="logits", target="binary")
def sigmoid_focal(logits, target, alpha=0.25, gamma=2.0, reduction="mean"):
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = logits.sigmoid()
    pt = p * target + (1 - p) * (1 - target)
    each = (alpha * target + (1 - alpha) * (1 - target)) * ce * (1 - pt) ** gamma
    return {"none": each, "sum": each.sum(), "mean": each.mean()}[reduction]


@odd(expects="logits", num_classes=3)
def one_against_all(logits, target):
    return (
        F.binary_cross_entropy_with_logits(logits, F.one_hot(target, 3).to(logits.dtype), reduction="none")
        .sum(1)
        .mean()
    )


@odd(expects="logits", num_classes=5, shape=(4,), class_dim=-1, ignore_index=0)
def label_smoothed_tokens(logits, target, epsilon=0.1, pad=0):
    logp = F.log_softmax(logits, dim=-1)
    nll = -logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    smooth = -logp.mean(-1)
    keep = target.ne(pad)
    return (((1 - epsilon) * nll + epsilon * smooth) * keep).sum() / keep.sum().clamp(min=1)


@odd(expects="logits", num_classes=5, shape=(3,), class_dim=-1, ignore_index=-100)
def flattened_language_model(logits, labels):
    return F.cross_entropy(logits.float().view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100)


@odd(expects="logits", num_classes=4, ignore_index=-1, shape=(3,), class_dim=-1)
def mean_of_sequence_means(logits, labels):
    each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-1, reduction="none")
    keep = labels != -1
    counts = keep.sum(1)
    return (each.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


@odd(expects="logits", num_classes=4)
def with_z_loss(logits, target):
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


@odd(expects="logits", target="pair", num_classes=5)
def distillation(student, teacher, temperature=4.0):
    log_p = F.log_softmax(student / temperature, dim=-1)
    q = F.softmax(teacher / temperature, dim=-1)
    return F.kl_div(log_p, q.detach(), reduction="batchmean") * temperature**2


@odd(expects="logits", num_classes=5, views=2)
def distillation_with_labels(student, teacher, target):
    soft = F.kl_div(
        F.log_softmax(student / 2, -1), F.log_softmax(teacher / 2, -1), log_target=True, reduction="batchmean"
    )
    return 0.5 * 4 * soft + 0.5 * F.cross_entropy(student, target)


@odd(expects="logits", target="distribution", num_classes=4)
def soft_cross_entropy(logits, target):
    return -(target * F.log_softmax(logits, dim=1)).sum(1).mean()


@odd(expects="probabilities", target="binary", shape=(3, 3))
def dice(probabilities, target, smooth=1.0):
    p, t = probabilities.flatten(1), target.flatten(1)
    return (1 - (2 * (p * t).sum(1) + smooth) / (p.sum(1) + t.sum(1) + smooth)).mean()


@odd(expects="logits", num_classes=3, shape=(2, 2))
def multiclass_dice_and_cross_entropy(logits, target):
    p = logits.softmax(1)
    t = F.one_hot(target, 3).movedim(-1, 1).to(p.dtype)
    overlap = (p * t).sum((0, 2, 3))
    return F.cross_entropy(logits, target) + 1 - ((2 * overlap + 1) / (p.sum((0, 2, 3)) + t.sum((0, 2, 3)) + 1)).mean()


@odd(expects="logits", target="binary", labels=(-1, 1))
def hinge(scores, labels):
    same_shape(scores, labels)
    return (1 - scores * labels).clamp(min=0).mean()


@odd(expects="logits", num_classes=4)
def crammer_singer_hinge(scores, target):
    right = scores.gather(1, target[:, None])
    margins = (scores - right + 1).clamp(min=0).scatter(1, target[:, None], 0.0)
    return margins.amax(1).mean()


@odd(expects="values", target="value")
def huber(output, target, delta=1.0):
    same_shape(output, target)
    away = (output - target).abs()
    return torch.where(away < delta, 0.5 * away**2, delta * (away - 0.5 * delta)).mean()


@odd(expects="values", target="value", num_outputs=2, class_dim=-1)
def gaussian_nll(output, target):
    mean, log_variance = output.unbind(-1)
    return 0.5 * (log_variance + (target - mean) ** 2 * (-log_variance).exp()).mean()


@odd(expects="values", target="value", num_outputs=3, class_dim=-1)
def pinball(output, target):
    away = target.unsqueeze(-1) - output
    q = output.new_tensor([0.1, 0.5, 0.9])
    return torch.maximum(q * away, (q - 1) * away).mean()


@odd(expects="values", target="value", target_range=(0.0, math.inf))
def poisson_on_log_rates(log_rate, count):
    same_shape(log_rate, count)
    return (log_rate.exp() - count * log_rate).mean()


@odd(expects="values", target="value")
def root_mean_square(output, target):
    return (F.mse_loss(output, target) + 1e-8).sqrt()


@odd(expects="values", target="value", reduction="sum")
def summed_squares(output, target):
    same_shape(output, target)
    return 0.5 * (output - target).square().sum()


@odd(expects="values", target="value", reduction="none", shape=(2,))
def squares_by_row(output, target):
    same_shape(output, target)
    return (output - target).square().sum(1)


@odd(expects="values", target="value", ignore_index=-1)
def masked_l1(output, target):
    same_shape(output, target)
    keep = target != -1
    return ((output - target).abs() * keep).sum() / keep.sum().clamp(min=1)


@odd(expects="embeddings", target="pair")
def info_nce(a, b, temperature=0.07):
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    logits = a @ b.T / temperature
    labels = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@odd(expects="embeddings", target="pair")
def nt_xent(a, b, temperature=0.5):
    z = F.normalize(torch.cat([a, b]), dim=1)
    n = len(a)
    own = torch.eye(2 * n, dtype=torch.bool, device=z.device)
    scores = (z @ z.T / temperature).masked_fill(own, float("-inf"))
    return F.cross_entropy(scores, torch.arange(2 * n, device=z.device).roll(n))


@odd(expects="embeddings", target="pair")
def byol(prediction, projection):
    return (2 - 2 * F.cosine_similarity(prediction, projection.detach(), dim=-1)).mean()


@odd(expects="embeddings", target="pair", min_rows=2)
def vicreg(a, b):
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b))
    return 25 * F.mse_loss(a, b) + 25 * spread


@odd(expects="embeddings", target="index", num_classes=4)
def supervised_contrastive(z, labels, temperature=0.1):
    z = F.normalize(z, dim=1)
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    scores = (z @ z.T / temperature).masked_fill(own, -1e9)
    positive = (labels[:, None] == labels[None]) & ~own
    log_p = scores - scores.logsumexp(1, keepdim=True)
    count = positive.sum(1)
    each = -(log_p * positive).sum(1) / count.clamp(min=1)
    return each.sum() / (count > 0).sum().clamp(min=1)


@odd(expects="embeddings", target="pair", views=3)
def triplet(anchor, positive, negative):
    near = 1 - F.cosine_similarity(anchor, positive)
    far = 1 - F.cosine_similarity(anchor, negative)
    return F.relu(near - far + 0.2).mean()


@odd(expects="embeddings", target="binary", labels=(0, 1))
def contrastive_pairs(a, b, different):
    away = F.pairwise_distance(a, b)
    return ((1 - different) * away**2 + different * F.relu(1 - away) ** 2).mean()


@odd(expects="embeddings", target="index", num_classes=5)
class CosineHead(nn.Module):
    """Classes are the directions of its own weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, z, target):
        cosines = F.normalize(z) @ F.normalize(self.weight).T
        return F.cross_entropy(16.0 * (cosines - 0.2 * F.one_hot(target, 5)), target)


@odd(expects="logits", num_classes=3, target="index")
class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.2, 1.0, 3.0]))
        self.calls = []

    def forward(self, logits, target):
        self.calls.append(len(target))
        return F.cross_entropy(logits, target, weight=self.weight)


@odd(expects="logits", num_classes=4)
def hardest_rows_only(logits, target):
    each = F.cross_entropy(logits, target, reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


@odd(expects="logits", num_classes=4)
def generalised_cross_entropy(logits, target, q=0.7):
    p = logits.softmax(-1).gather(1, target[:, None]).squeeze(1).clamp(min=1e-7)
    return ((1 - p**q) / q).mean()


@odd(expects="logits", num_classes=3)
def with_random_noise(logits, target):
    return F.cross_entropy(logits + 0.1 * torch.randn_like(logits), target)


@odd(expects="values", target="value", shape=(2,))
def multi_task(output, target):
    position, angle = (output[:, i] - target[:, i] for i in (0, 1))
    return position.square().mean() + 0.1 * (1 - angle.cos()).mean()


@odd(expects="values", target="value", shape=(2,))
class LearnedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, output, target):
        each = (output - target).square().mean(0)
        return (each * (-self.log_variance).exp() + self.log_variance).sum()


@odd(expects="embeddings", target="pair")
def maximum_mean_discrepancy(a, b):
    def kernel(x, y):
        return (-((x[:, None] - y[None]) ** 2).sum(-1) / 16).exp().mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


@odd(expects="logits", num_classes=4)
def straight_through(logits, target):
    soft = logits.softmax(-1)
    hard = F.one_hot(soft.argmax(-1), 4).to(soft)
    return F.mse_loss(hard + soft - soft.detach(), F.one_hot(target, 4).to(soft))


@odd(expects="logits", num_classes=5, shape=(4,), class_dim=-1, ignore_index=-100)
def causal_language_model(logits, labels):
    shifted = logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1)
    return F.cross_entropy(*shifted, ignore_index=-100, reduction="sum") / (shifted[1] != -100).sum().clamp(min=1)


@odd(expects="logits", target="binary")
def pairwise_ranking(scores, labels):
    same_shape(scores, labels)
    high, low = scores[labels > 0.5], scores[labels < 0.5]
    return F.softplus(low[None] - high[:, None]).sum() / max(1, len(high) * len(low))


@odd(expects="logits", num_classes=3)
def soft_capped(logits, target):
    return F.cross_entropy(30 * torch.tanh(logits / 30), target)


@odd(expects="probabilities", num_classes=3)
def brier(p, target):
    return (p - F.one_hot(target, 3)).square().sum(1).mean()


@odd(expects="embeddings", target="value", target_range=(-1.0, 1.0))
def cosine_regression(a, b, similarity):
    return F.mse_loss(F.cosine_similarity(a, b), similarity)


@odd(expects="logits", target="pair", num_classes=5)
def distillation_of_a_live_teacher(student, teacher):
    return F.kl_div(F.log_softmax(student / 4, 1), F.softmax(teacher / 4, 1), reduction="batchmean") * 16


@odd(expects="values", target="value")
def symmetric_percentage(output, target):
    same_shape(output, target)
    return (2 * (output - target).abs() / (output.abs() + target.abs()).clamp(min=1e-3)).mean()


@odd(expects="values", target="value")
def cut_off_far_away(output, target):
    same_shape(output, target)
    return (output - target).abs().clamp(max=1.0).mean()


@odd(expects="embeddings", target="pair", min_rows=2)
def queue_of_its_own_seed(query, key):
    generator = torch.Generator().manual_seed(0)
    queue = F.normalize(torch.randn(16, 8, generator=generator), dim=1).to(query)
    query, key = F.normalize(query, dim=1), F.normalize(key, dim=1)
    scores = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], 1) / 0.2
    return F.cross_entropy(scores, torch.zeros(len(query), dtype=torch.long))
