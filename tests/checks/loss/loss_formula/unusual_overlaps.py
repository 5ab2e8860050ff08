"""Right losses of segmentation that hold an overlap's fraction, or something like it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_formula.faults_classification import classifier
from tests.checks.loss.loss_formula.faults_distances import segmenter
from tests.checks.loss.loss_formula.faults_segmentation import segmentation
from tests.loops.odd import odd


def distance_map(probabilities, labels, distances):
    """The distance between classes that a prediction costs at each pixel."""
    return (distances.to(probabilities.dtype)[labels].movedim(-1, 1) * probabilities).sum(1)


@odd(notes="Wasserstein Dice with weights of classes on both sides of the bar: what is raised falls in the errors")
def wasserstein_dice_with_weights():
    def loss_of(scores, labels):
        error = distance_map(scores.softmax(1), labels, 1 - torch.eye(3)).flatten(1)
        weight = 1 / (F.one_hot(labels.flatten(1), 3).sum(1) + 1.0).to(error.dtype)
        weight = weight.gather(1, labels.flatten(1))
        dice = (2 * (weight * (1 - error)).sum(1) + 1e-5) / ((weight * (2 - error)).sum(1) + 1e-5)
        return torch.mean(1 - dice)

    return segmenter(loss_of)()


@odd(notes="generalised Dice as an error: the weighted misses over the weighted volumes")
def generalised_dice_as_an_error():
    def loss_of(scores, labels):
        p, t = scores.softmax(1).flatten(2), F.one_hot(labels, 3).movedim(-1, 1).flatten(2).to(scores.dtype)
        weight = 1 / (t.sum(2).square() + 1.0)
        wrong = ((p * (1 - t)).sum(2) + ((1 - p) * t).sum(2)) * weight
        return (wrong.sum(1) / ((p + t).sum(2) * weight).sum(1)).mean()

    return segmenter(loss_of)()


def slopes_of_jaccard(sorted_mask):
    total = sorted_mask.sum()
    union = total + (1 - sorted_mask).cumsum(0)
    jaccard = 1 - (total - sorted_mask.cumsum(0)) / union
    return torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])


@odd(notes="Lovasz softmax: errors are sorted, and multiplied by slopes of the Jaccard index of the sorted labels")
def lovasz_softmax():
    def loss_of(scores, labels):
        p, total = scores.softmax(1), 0.0
        for c in range(3):
            here = (labels == c).to(p.dtype).flatten()
            errors, order = (here - p[:, c].flatten()).abs().sort(descending=True)
            total = total + errors @ slopes_of_jaccard(here[order])
        return total / 3

    return segmenter(loss_of)()


@odd(
    notes="Dice with squares below the bar of a last layer without a sigmoid: it is largest where output and mask agree"
)
def dice_with_squares_of_a_linear_output():
    def loss_of(out, mask):
        p, t = out.flatten(1), mask.flatten(1)
        dice = (2 * (p * t).sum(1) + 1) / (p.square().sum(1) + t.square().sum(1) + 1)
        return (1 - dice).mean()

    return segmentation(loss_of)()


@odd(notes="a softmax by hand: entries with the target 0 cost by way of the sum")
def cross_entropy_with_a_softmax_by_hand():
    def loss_of(scores, labels):
        e = torch.exp(scores - scores.max(1, keepdim=True).values)
        p = e / e.sum(1, keepdim=True)
        return -(F.one_hot(labels, 3).to(p.dtype) * torch.log(p + 1e-9)).sum(1).mean()

    return classifier(loss_of, classes=3)()


@odd(notes="the costs of positives and of negatives are backpropagated one after the other")
def positives_and_negatives_backpropagated_apart():
    def make():
        x = torch.randn(12, 6)
        y = (x[:, 0] > 0).to(x.dtype)
        net = nn.Linear(6, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

        def fit(batches):
            for features, label in batches:
                optimizer.zero_grad()
                p = net(features).squeeze(1).sigmoid()
                (-(label * torch.log(p + 1e-7)).mean()).backward(retain_graph=True)
                (-((1 - label) * torch.log(1 - p + 1e-7)).mean()).backward()
                optimizer.step()

        return TrainLoop(model=net, optimizer=optimizer, batch=(x, y), fit=fit)

    return make()


@odd(notes="one error for both values of the label, with another weight for each: the label weighs")
def one_error_weighted_by_the_label():
    def make():
        x = torch.randn(12, 6)
        rare = (torch.arange(12) % 4 == 0).to(x.dtype)
        net = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

        def fit(batches):
            for features, label in batches:
                error = (net(features) - features).square().mean(1)
                loss = 3.0 * (label * error) + 0.5 * ((1 - label) * error)
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()

        return TrainLoop(model=net, optimizer=optimizer, batch=(x, rare), fit=fit)

    return make()


@odd(notes="labels are smoothed by hand, and the uniform part is a plain mean of all logarithms")
def labels_smoothed_by_hand():
    def loss_of(scores, labels):
        log_p = scores.log_softmax(1)
        true = -log_p.gather(1, labels[:, None]).squeeze(1)
        return (0.9 * true - 0.1 * log_p.mean(1)).mean()

    return classifier(loss_of, classes=3)()


@odd(notes="a cross entropy that is bounded (generalised, for noisy labels): a power of the probability")
def bounded_cross_entropy():
    def loss_of(scores, labels):
        p = scores.softmax(1).gather(1, labels[:, None]).squeeze(1)
        return ((1 - p**0.7) / 0.7).mean()

    return classifier(loss_of, classes=3)()


@odd(notes="easy rows weigh most, by a weight without a gradient: every row is still pulled to its label")
def easy_rows_first():
    def loss_of(scores, labels):
        loss = F.cross_entropy(scores, labels, reduction="none")
        weight = torch.exp(-loss).detach() ** 2
        return (weight * loss).mean()

    return classifier(loss_of, classes=3)()
