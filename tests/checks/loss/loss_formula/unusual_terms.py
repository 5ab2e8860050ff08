"""Right losses whose terms pull the same outputs to different places, or seem to."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.checks.loss.loss_formula.faults_classification import classifier
from tests.checks.loss.loss_formula.unusual_embeddings import compared, labelled
from tests.loops.odd import odd


def true_share(scores, labels):
    return (scores.softmax(1) * F.one_hot(labels, 3)).sum(1)


@odd(notes="PolyLoss with epsilon -1 (arXiv 2204.12511): one term rewards a small share, and their sum does not")
def poly_loss_with_a_negative_term():
    return classifier(lambda s, y: F.cross_entropy(s, y) - 1.0 * (1 - true_share(s, y)).mean(), classes=3)()


@odd(notes="squentropy (arXiv 2302.03952): squares of the wrong classes' scores next to a cross entropy of all")
def squentropy():
    def loss_of(scores, labels):
        return F.cross_entropy(scores, labels) + (scores.square() * (1 - F.one_hot(labels, 3))).sum(1).mean() / 2

    return classifier(loss_of, classes=3)()


@odd(notes="smoothed labels in one term and hard ones in the other: what is best for one is nearly so for both")
def smoothed_labels_next_to_hard_ones():
    def loss_of(scores, labels):
        return F.cross_entropy(scores, labels, label_smoothing=0.2) - true_share(scores, labels).mean()

    return classifier(loss_of, classes=3)()


@odd(notes="discriminative loss (arXiv 1708.02551): rows are pulled to their class mean, and means from each other")
def rows_pulled_to_their_class_mean():
    def loss_of(model, b):
        x, labels = b
        of_class = F.one_hot(labels, 3).to(x.dtype)
        rows = model(x)
        means = of_class.T @ rows / of_class.sum(0)[:, None]
        pull = F.relu((rows - of_class @ means).norm(dim=1) - 0.1).square().mean()
        return pull + F.relu(2.0 - torch.pdist(means)).square().mean()

    return compared(loss_of, labelled())
