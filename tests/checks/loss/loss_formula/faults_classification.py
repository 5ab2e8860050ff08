"""Cross entropies, focal and hinge losses written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def classifier(loss_of, classes=1):
    """A small net on rows that a linear function of the features separates, but for some noise."""

    def make():
        features = torch.randn(12, 6)
        scores = features @ torch.randn(6, max(classes, 2)) + 0.3 * torch.randn(12, max(classes, 2))
        labels = scores.argmax(1)
        labels[: max(classes, 2)] = torch.arange(max(classes, 2))
        model = mlp(6, 16, classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                out = model(x)
                loss = loss_of(out.squeeze(-1), y.to(out.dtype)) if classes == 1 else loss_of(out, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(features, labels), fit=fit)

    return make


def binary_entropy(p, y):
    return -(y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7)).mean()


def positives_only(p, y):
    return -(y * torch.log(p + 1e-7)).mean()


pair(
    "only_positives_cost",
    "loss_formula",
    "term_missing",
    quick=True,
    where="return -(y * torch.log(p + 1e-7)).mean()",
    faulty=classifier(lambda z, y: positives_only(z.sigmoid(), y)),
    fixed=classifier(lambda z, y: binary_entropy(z.sigmoid(), y)),
)


def opposed(p, y):
    return -(y * p.log() - (1 - y) * (1 - p).log()).mean()


pair(
    "negatives_with_the_other_sign",
    "loss_formula",
    "term_sign",
    quick=True,
    where="return -(y * p.log() - (1 - y) * (1 - p).log()).mean()",
    faulty=classifier(lambda z, y: opposed(z.sigmoid(), y)),
    fixed=classifier(lambda z, y: binary_entropy(z.sigmoid(), y)),
)


def focal(z, y, gamma=2.0, alpha=0.25):
    loss = F.binary_cross_entropy_with_logits(z, y, reduction="none")
    pt = torch.exp(-loss)
    return (alpha * (1 - pt) ** gamma * loss).mean()


def focal_of_the_mean(z, y, gamma=2.0, alpha=0.25):
    loss = F.binary_cross_entropy_with_logits(z, y)
    pt = torch.exp(-loss)
    return alpha * (1 - pt) ** gamma * loss


pair(
    "focal_weight_of_the_mean_loss",
    "loss_formula",
    "mean_taken_early",
    quick=True,
    where="return alpha * (1 - pt) ** gamma * loss",
    faulty=classifier(focal_of_the_mean),
    fixed=classifier(focal),
)


def focal_over_classes(scores, labels, gamma=2.0, easy=False):
    loss = F.cross_entropy(scores, labels, reduction="none")
    pt = torch.exp(-loss)
    weight = pt**gamma if easy else (1 - pt) ** gamma
    return (weight * loss).mean()


pair(
    "easy_rows_weigh_most",
    "loss_formula",
    "turned_round",
    quick=True,
    faulty=classifier(lambda z, y: focal_over_classes(z, y, easy=True), classes=3),
    fixed=classifier(focal_over_classes, classes=3),
)


def focal_by_one_side(z, y, gamma=2.0):
    p = z.sigmoid()
    loss = F.binary_cross_entropy_with_logits(z, y, reduction="none")
    return ((1 - p) ** gamma * loss).mean()


def focal_by_both(z, y, gamma=2.0):
    p = z.sigmoid()
    pt = torch.where(y == 1, p, 1 - p)
    loss = F.binary_cross_entropy_with_logits(z, y, reduction="none")
    return ((1 - pt) ** gamma * loss).mean()


pair(
    "focal_weight_by_the_positive_probability",
    "loss_formula",
    "ingredient_differs",
    quick=True,
    where="return ((1 - p) ** gamma * loss).mean()",
    faulty=classifier(focal_by_one_side),
    fixed=classifier(focal_by_both),
)


def hinge(scores, sign):
    return F.relu(1 - sign * scores).mean()


pair(
    "hinge_on_zeros_and_ones",
    "loss_formula",
    "labels_as_signs",
    quick=True,
    where="return F.relu(1 - sign * scores).mean()",
    faulty=classifier(hinge),
    fixed=classifier(lambda z, y: hinge(z, 2 * y - 1)),
)


def focal_by_terms(weight_of_positives):
    def loss_of(z, y, alpha=0.25, gamma=2.0):
        p = z.sigmoid()
        weight = weight_of_positives(1 - p, gamma)
        loss = -y * alpha * weight * torch.log(p) - (1 - y) * (1 - alpha) * p**gamma * torch.log(1 - p)
        return loss.mean()

    return loss_of


pair(
    "focal_exponent_as_a_factor",
    "loss_formula",
    "power_differs",
    level="advice",
    where="return loss.mean()",
    faulty=classifier(focal_by_terms(lambda q, gamma: q * gamma)),
    fixed=classifier(focal_by_terms(lambda q, gamma: q**gamma)),
)
