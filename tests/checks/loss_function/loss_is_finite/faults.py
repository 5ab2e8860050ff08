"""Values and gradients that are not finite for one kind of call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.loss_function.loss_is_finite.property import CAUSE_OF
from tests.losses.pairs import pair
from tests.losses.unusual import same_shape


def finite_pair(trait, faulty, fixed, **contract):
    """A pair whose faulty loss is not finite for cases with this trait, by which it is named."""
    pair("loss_is_finite", CAUSE_OF[trait], faulty, fixed, name=f"{trait}-{faulty.__name__}", **contract)


def logarithm_of_logits(logits, target):
    return -logits.gather(1, target[:, None]).log().mean()


finite_pair("ordinary", logarithm_of_logits, F.cross_entropy, expects="logits", num_classes=3)


def normalised_by_batch(output, target):
    same_shape(output, target)
    return ((output - target) ** 2).mean() / target.std()


def normalised_by_batch_of_two(output, target):
    same_shape(output, target)
    spread = target.std() if len(target) > 1 else target.new_tensor(1.0)
    return ((output - target) ** 2).mean() / spread.clamp(min=1e-6)


finite_pair("one_row", normalised_by_batch, normalised_by_batch_of_two, expects="values", target="value", shape=())


def standardised_contrast(a, b):
    return F.mse_loss((a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0))


def standardised_contrast_with_eps(a, b):
    def standard(x):
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-4).sqrt()

    return F.mse_loss(standard(a), standard(b))


finite_pair(
    "one_row",
    standardised_contrast,
    standardised_contrast_with_eps,
    level="advice",
    expects="embeddings",
    target="pair",
)


def per_positive(logits, target):
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return each.sum() / target.sum()


def per_positive_or_one(logits, target):
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return each.sum() / target.sum().clamp(min=1)


finite_pair("one_class", per_positive, per_positive_or_one, expects="logits", target="binary")


def contrast(z, labels, guard):
    z = F.normalize(z, dim=1)
    own = torch.eye(len(z), dtype=torch.bool)
    scores = (z @ z.T / 0.1).masked_fill(own, -1e9)
    positive = (labels[:, None] == labels[None]) & ~own
    log_p = scores - scores.logsumexp(1, keepdim=True)
    count = positive.sum(1)
    if not guard:
        return -((log_p * positive).sum(1) / count).mean()
    return -((log_p * positive).sum(1) / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)


def supervised_contrast(z, labels):
    return contrast(z, labels, guard=False)


def supervised_contrast_guarded(z, labels):
    return contrast(z, labels, guard=True)


finite_pair(
    "no_partner",
    supervised_contrast,
    supervised_contrast_guarded,
    expects="embeddings",
    target="index",
    num_classes=4,
)


def standardised_scores(logits, target):
    return F.cross_entropy((logits - logits.mean(1, keepdim=True)) / logits.std(1, keepdim=True), target)


def standardised_scores_with_eps(logits, target):
    spread = (logits.var(1, keepdim=True) + 1e-5).sqrt()
    return F.cross_entropy((logits - logits.mean(1, keepdim=True)) / spread, target)


finite_pair(
    "tied",
    standardised_scores,
    standardised_scores_with_eps,
    expects="logits",
    num_classes=3,
)


def cosine_by_hand(a, b):
    a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
    return (1 - (a * b).sum(1)).mean()


def cosine(a, b):
    return (1 - F.cosine_similarity(a, b)).mean()


finite_pair("zero", cosine_by_hand, cosine, expects="embeddings", target="pair")


def distance(output, target):
    return (output - target).square().sum(1).sqrt().mean()


def distance_with_eps(output, target):
    return ((output - target).square().sum(1) + 1e-12).sqrt().mean()


finite_pair("right", distance, distance_with_eps, expects="values", target="value", shape=(2,))


def softmax_by_hand(logits, target):
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    return F.nll_loss(p.log(), target)


def softmax_of_torch(logits, target):
    return F.nll_loss(logits.log_softmax(1), target)


finite_pair("large", softmax_by_hand, softmax_of_torch, expects="logits", num_classes=3)


def log_of_softmax(logits, target):
    return F.nll_loss(logits.softmax(1).log(), target)


finite_pair("large", log_of_softmax, F.cross_entropy, expects="logits", num_classes=3)


def cross_entropy_of_probabilities(p, target):
    return -(target * p.log() + (1 - target) * (1 - p).log()).mean()


finite_pair(
    "saturated",
    cross_entropy_of_probabilities,
    F.binary_cross_entropy,
    expects="probabilities",
    target="binary",
    shape=(2,),
)


def masked_by_product(output, target):
    same_shape(output, target)
    keep = target != -1
    return ((output - target.masked_fill(~keep, float("nan"))).abs().nan_to_num(float("nan")) * keep).sum() / keep.sum()


def masked_by_choice(output, target):
    same_shape(output, target)
    keep = target != -1
    return torch.where(keep, (output - target).abs(), 0.0).sum() / keep.sum().clamp(min=1)


finite_pair(
    "some_ignored",
    masked_by_product,
    masked_by_choice,
    expects="values",
    target="value",
    ignore_index=-1,
    shape=(),
)


def mean_over_kept(logits, target):
    return F.cross_entropy(logits, target)


def mean_over_kept_or_one(logits, target):
    return F.cross_entropy(logits, target, reduction="sum") / (target != -100).sum().clamp(min=1)


finite_pair(
    "all_ignored",
    mean_over_kept,
    mean_over_kept_or_one,
    level="advice",
    expects="logits",
    num_classes=3,
    ignore_index=-100,
)


def sum_by_mean_of_kept(logits, target):
    keep = target != -100
    return F.cross_entropy(logits, target, reduction="none")[keep].mean() * keep.sum()


def sum_of_kept(logits, target):
    return F.cross_entropy(logits, target, reduction="sum")


finite_pair(
    "all_ignored",
    sum_by_mean_of_kept,
    sum_of_kept,
    expects="logits",
    num_classes=3,
    ignore_index=-100,
    reduction="sum",
)


def angle(a, b):
    return torch.acos(F.cosine_similarity(a, b)).mean()


def angle_inside(a, b):
    return torch.acos(F.cosine_similarity(a, b).clamp(-0.999999, 0.999999)).mean()


finite_pair("right", angle, angle_inside, expects="embeddings", target="pair")
