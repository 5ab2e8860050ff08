"""Losses that take their output for something else than it is."""

from __future__ import annotations

import torch.nn.functional as F

from tests.losses.pairs import pair

CHECK = "loss_input_as_declared"


def softmax_twice(logits, target):
    return F.cross_entropy(logits.softmax(-1), target)


pair(CHECK, "probabilities_as_logits", softmax_twice, F.cross_entropy, expects="logits", num_classes=4)


def sigmoid_before_softmax(logits, target):
    return F.cross_entropy(logits.sigmoid(), target)


pair(CHECK, "probabilities_as_logits", sigmoid_before_softmax, F.cross_entropy, expects="logits", num_classes=4)


def sigmoid_twice(logits, target):
    return F.binary_cross_entropy_with_logits(logits.sigmoid(), target)


pair(
    CHECK,
    "probabilities_as_logits",
    sigmoid_twice,
    F.binary_cross_entropy_with_logits,
    expects="logits",
    target="binary",
)


def cross_entropy_of_probabilities(p, target):
    return F.cross_entropy(p, target)


def nll_of_probabilities(p, target):
    return F.nll_loss(p.clamp(min=1e-7).log(), target)


pair(
    CHECK,
    "probabilities_as_logits",
    cross_entropy_of_probabilities,
    nll_of_probabilities,
    expects="probabilities",
    num_classes=3,
)


def nll_of_logits(logits, target):
    return F.nll_loss(logits, target)


pair(CHECK, "linear_in_logits", nll_of_logits, F.cross_entropy, expects="logits", num_classes=3)


def softmax_over_rows(logits, target):
    return F.nll_loss(F.log_softmax(logits, dim=0), target)


def softmax_over_classes(logits, target):
    return F.nll_loss(F.log_softmax(logits, dim=1), target)


pair(CHECK, "wrong_axis", softmax_over_rows, softmax_over_classes, expects="logits", num_classes=3)


def softmax_over_time(logits, target):
    return F.nll_loss(F.log_softmax(logits, dim=1).transpose(1, 2), target)


def softmax_over_vocabulary(logits, target):
    return F.nll_loss(F.log_softmax(logits, dim=-1).transpose(1, 2), target)


pair(
    CHECK,
    "wrong_axis",
    softmax_over_time,
    softmax_over_vocabulary,
    expects="logits",
    num_classes=3,
    shape=(4,),
    class_dim=-1,
)


def with_square_of_logits(logits, target):
    return F.cross_entropy(logits, target) + 0.01 * logits.sum(1).square().mean()


pair(
    CHECK,
    "not_invariant",
    with_square_of_logits,
    F.cross_entropy,
    level="advice",
    expects="logits",
    num_classes=3,
)


def cross_entropy_of_log_probabilities(log_p, target):
    return F.cross_entropy(log_p, target)


pair(
    CHECK,
    "normalised_again",
    cross_entropy_of_log_probabilities,
    F.nll_loss,
    level="advice",
    expects="log_probabilities",
    num_classes=3,
)


def divergence_with_log_target(log_p, target):
    return F.kl_div(log_p, target, reduction="batchmean", log_target=True)


def divergence(log_p, target):
    return F.kl_div(log_p, target, reduction="batchmean")


pair(
    CHECK,
    "target_as_logarithm",
    divergence_with_log_target,
    divergence,
    expects="log_probabilities",
    target="distribution",
    num_classes=3,
)


def divergence_of_probabilities(p, target):
    return F.kl_div(p, target, reduction="batchmean")


def divergence_of_logarithms(p, target):
    return F.kl_div(p.clamp(min=1e-7).log(), target, reduction="batchmean")


pair(
    CHECK,
    "probabilities_as_logarithms",
    divergence_of_probabilities,
    divergence_of_logarithms,
    expects="probabilities",
    target="distribution",
    num_classes=3,
)


def nll_without_logarithm(p, target):
    return F.nll_loss(p, target)


pair(
    CHECK,
    "linear_in_probabilities",
    nll_without_logarithm,
    nll_of_probabilities,
    level="advice",
    expects="probabilities",
    num_classes=3,
)


def divergence_of_squashed(logits, target):
    return F.kl_div(logits.softmax(1), target, reduction="batchmean")


def divergence_of_its_logarithms(logits, target):
    return F.kl_div(logits.log_softmax(1), target, reduction="batchmean")


pair(
    CHECK,
    "probabilities_as_logarithms",
    divergence_of_squashed,
    divergence_of_its_logarithms,
    expects="logits",
    target="distribution",
    num_classes=4,
)


def distilled_scores(student, teacher):
    return F.kl_div(student, teacher.softmax(1).detach(), reduction="batchmean")


def distilled_logarithms(student, teacher):
    return F.kl_div(student.log_softmax(1), teacher.softmax(1).detach(), reduction="batchmean")


pair(
    CHECK,
    "probabilities_as_logarithms",
    distilled_scores,
    distilled_logarithms,
    expects="logits",
    target="pair",
    num_classes=4,
)
