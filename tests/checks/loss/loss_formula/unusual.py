"""Losses written by hand that look wrong to a textbook and are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_formula.faults_boxes import detector
from tests.checks.loss.loss_formula.faults_classification import classifier
from tests.checks.loss.loss_formula.faults_distances import regression, segmenter
from tests.checks.loss.loss_formula.faults_segmentation import segmentation
from tests.loops.nets import mlp
from tests.loops.odd import odd


@odd(notes="Tversky to a power, of one minus the index, with other weights for both kinds of errors")
def focal_tversky_with_unequal_weights():
    def loss_of(out, mask):
        p, t = out.sigmoid().flatten(1), mask.flatten(1)
        hit, false, missed = (p * t).sum(1), (p * (1 - t)).sum(1), ((1 - p) * t).sum(1)
        return ((1 - (hit + 1) / (hit + 0.3 * false + 0.7 * missed + 1)) ** 0.75).mean()

    return segmentation(loss_of)()


@odd(notes="the Dice score is subtracted from a cross entropy")
def entropy_minus_dice():
    def loss_of(out, mask):
        p = out.sigmoid()
        dice = (2 * (p * mask).sum((1, 2, 3)) + 1) / ((p + mask).sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(out, mask) - dice.mean()

    return segmentation(loss_of)()


@odd(notes="the background's Dice is left out, and classes are summed in a loop")
def dice_without_background_class_by_class():
    def loss_of(scores, labels):
        p = scores.softmax(1)
        total = 0.0
        for c in range(1, 3):
            t = (labels == c).to(p.dtype)
            total = total + 1 - (2 * (p[:, c] * t).sum() + 1e-5) / (p[:, c].sum() + t.sum() + 1e-5)
        return total / 2

    return segmenter(loss_of)()


@odd(notes="classes last on both sides before both are flattened")
def both_sides_flattened_with_classes_last():
    def loss_of(scores, labels):
        p = scores.softmax(1).permute(0, 2, 3, 1).reshape(-1, 3)
        t = F.one_hot(labels, 3).reshape(-1, 3).to(p.dtype)
        return 1 - (2 * (p * t).sum(0) / (p + t).sum(0)).mean()

    return segmenter(loss_of)()


@odd(notes="positives and negatives are averaged each by their own number")
def entropy_of_positives_and_negatives_apart():
    def loss_of(z, y):
        p = z.sigmoid()
        positive = -(y * torch.log(p)).sum() / y.sum()
        negative = -((1 - y) * torch.log(1 - p)).sum() / (1 - y).sum()
        return (positive + negative) / 2

    return classifier(loss_of)()


@odd(notes="alpha weighs positives and negatives apart, and the sum is divided by the number of positives")
def focal_with_alpha_by_class_over_positives():
    def loss_of(z, y):
        loss = F.binary_cross_entropy_with_logits(z, y, reduction="none")
        pt = torch.exp(-loss)
        alpha = torch.where(y == 1, 0.25, 0.75)
        return (alpha * (1 - pt) ** 2 * loss).sum() / y.sum().clamp(min=1)

    return classifier(loss_of)()


@odd(notes="the true class stays in the sum, where it costs the margin whatever the scores are")
def hinge_with_the_true_class_in_the_sum():
    def loss_of(scores, labels):
        right = scores.gather(1, labels[:, None])
        return F.relu(0.5 + scores - right).square().sum(1).mean()

    return classifier(loss_of, classes=3)()


@odd(notes="whole cross entropies of the hardest half")
def hardest_half_by_topk():
    def loss_of(scores, labels):
        losses = -scores.log_softmax(1).gather(1, labels[:, None]).squeeze(1)
        return losses.topk(6).values.mean()

    return classifier(loss_of, classes=3)()


@odd(notes="whole pixels: sides are one longer than the differences of corners")
def iou_of_whole_pixels():
    def loss_of(p, t):
        p, t = 20 * p, 20 * t
        sides = (torch.min(p[:, 2:], t[:, 2:]) - torch.max(p[:, :2], t[:, :2]) + 1).clamp(min=0)
        both = sides.prod(1)
        area = [(b[:, 2] - b[:, 0] + 1) * (b[:, 3] - b[:, 1] + 1) for b in (p, t)]
        return -torch.log(both / (area[0] + area[1] - both) + 1e-7).mean()

    return detector(loss_of)()


@odd(notes="the mean error is penalised beside the mean square: predictions are meant to be unbiased")
def square_error_with_a_penalty_on_the_bias():
    return regression(lambda p, t: (p - t).square().mean() + (p - t).mean() ** 2)()


@odd(notes="the mean of the outputs is matched with the mean of the targets: rows have no order")
def means_of_two_samples_matched():
    def loss_of(p, t):
        return (p.mean(0) - t.mean(0)).square().sum() + (p.std(0) - t.std(0)).square().sum()

    return regression(loss_of)()


@odd(notes="a margin keeps predictions away from rows of other classes: a distance is made larger")
def distances_to_other_rows_made_larger():
    def loss_of(p, t):
        apart = (p - t.roll(1, 0)).square().sum(1).sqrt()
        return ((p - t).square().sum(1) + F.relu(1 - apart)).mean()

    return regression(loss_of)()


@odd(notes="a game: the critic of domains is trained, and the features are trained to make it worse")
def features_against_a_critic_of_domains():
    def make():
        x, label = torch.randn(12, 5), torch.arange(12) % 3
        domain = (torch.arange(12) >= 6).to(x.dtype)
        features, head, critic = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        main = torch.optim.Adam([*features.parameters(), *head.parameters()], lr=1e-2)
        other = torch.optim.Adam(critic.parameters(), lr=1e-2)

        def entropy(p, t):
            return -(t * torch.log(p + 1e-7) + (1 - t) * torch.log(1 - p + 1e-7)).mean()

        def fit(batches):
            for a, y, d in batches:
                other.zero_grad()
                entropy(critic(features(a).detach()).squeeze(-1).sigmoid(), d).backward()
                other.step()
                main.zero_grad()
                hidden = features(a).tanh()
                against = entropy(critic(hidden).squeeze(-1).sigmoid(), d)
                (F.cross_entropy(head(hidden), y) - 0.1 * against).backward()
                main.step()

        return TrainLoop(
            model={"features": features, "head": head, "critic": critic},
            optimizer=[main, other],
            batch=(x, label, domain),
            fit=fit,
        )

    return make()


@odd(notes="positives and negatives have exponents of their own, and easy negatives are cut off by a shifted clamp")
def asymmetric_loss_of_many_labels():
    def loss_of(scores, targets):
        y = (targets > 0).to(scores.dtype)
        p = scores.sigmoid()
        absent = (1 - p + 0.05).clamp(max=1)
        entropy = y * torch.log(p.clamp(min=1e-8)) + (1 - y) * torch.log(absent.clamp(min=1e-8))
        weight = (1 - p * y - absent * (1 - y)) ** (1 * y + 4 * (1 - y))
        return -(weight * entropy).sum()

    return regression(loss_of)()


@odd(notes="heatmaps: entries near a centre cost less, by a power of the soft target")
def focal_loss_of_heatmaps():
    def loss_of(scores, targets):
        heat = torch.exp(-targets.square())
        heat = torch.where(heat > 0.9, torch.ones_like(heat), heat)
        p = scores.sigmoid().clamp(1e-4, 1 - 1e-4)
        centre = heat.eq(1).to(p.dtype)
        found = torch.log(p) * (1 - p) ** 2 * centre
        empty = torch.log(1 - p) * p**2 * (1 - heat) ** 4 * (1 - centre)
        return -(found.sum() + empty.sum()) / centre.sum().clamp(min=1)

    return regression(loss_of)()


@odd(notes="distances to the own centre, kept above 0 by a clamp: no hinge, although labels of 0 and 1 multiply them")
def distances_to_the_own_centre_are_clamped():
    torch.manual_seed(0)
    body, head, centres = mlp(8, 12, 4), nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters(), centres], lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            features = body(x)
            apart = (torch.cdist(features, centres).square() * F.one_hot(y, 3)).clamp(1e-12, 1e12)
            (F.cross_entropy(head(features), y) + 0.05 * apart.sum() / len(x)).backward()
            optimizer.step()

    model = nn.ModuleDict({"body": body, "head": head})
    model.register_parameter("centres", centres)
    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(12, 8), torch.randint(0, 3, (12,))), fit=fit)


@odd(notes="the error in decibels is one logarithm less another: only the mean of that difference is trained")
def error_in_decibels():
    def loss_of(out, targets):
        out, targets = out.reshape(4, -1), targets.reshape(4, -1)
        power = targets.square().sum(-1)
        return (10 * torch.log10((out - targets).square().sum(-1)) - 10 * torch.log10(power)).mean()

    return regression(loss_of)()


@odd(notes="a Jaccard score counts twice in the loss, with its smoothing: a weight, not Dice's factor")
def jaccard_weighted_by_two():
    def loss_of(out, mask):
        p, t = out.sigmoid().flatten(1), mask.flatten(1)
        both = (p * t).sum(1)
        return (1 - 2 * (both + 1) / (p.sum(1) + t.sum(1) - both + 1)).mean()

    return segmentation(loss_of)()


@odd(notes="a hard sigmoid before the Dice: probabilities, although the outputs of the layer are none")
def dice_of_clamped_scores():
    def loss_of(out, mask):
        p, t = (0.5 + out / 2).clamp(0, 1), mask
        both, areas = (p * t).sum((2, 3)), p.sum((2, 3)) + t.sum((2, 3))
        return 1 - ((2 * both + 1) / (areas + 1).clamp(min=1e-6)).mean()

    return segmentation(loss_of)()


@odd(
    notes="places are drawn from a histogram that a network gives: gather takes a table of the batch and an index that "
    "is made of weights (NeRF)"
)
def places_drawn_from_a_learned_histogram():
    coarse, fine = (nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(2))
    optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=1e-3)

    def drawn(bins, weights):
        cdf = torch.cumsum(weights / weights.sum(-1, keepdim=True), -1)
        cdf = torch.cat([torch.zeros_like(cdf[:, :1]), cdf], -1)
        u = torch.rand(len(bins), 4)
        after = torch.searchsorted(cdf, u, right=True)
        both = torch.stack([(after - 1).clamp(min=0), after.clamp(max=cdf.shape[-1] - 1)], -1)
        shape = (*both.shape[:2], cdf.shape[-1])
        low = torch.gather(cdf.unsqueeze(1).expand(shape), 2, both)
        edges = torch.gather(bins.unsqueeze(1).expand(shape), 2, both)
        share = (u - low[..., 0]) / (low[..., 1] - low[..., 0]).clamp(min=1e-5)
        return (edges[..., 0] + share * (edges[..., 1] - edges[..., 0])).detach()

    def fit(batches):
        for z, target in batches:
            raw = coarse(z[..., None])
            weights = raw[..., 0].softmax(-1)
            first = (weights * raw[..., 1]).sum(-1)
            places, _ = torch.sort(torch.cat([z, drawn(0.5 * (z[:, 1:] + z[:, :-1]), weights[:, 1:-1])], -1), -1)
            raw = fine(places[..., None])
            steps = torch.cat([places[:, 1:] - places[:, :-1], torch.ones(len(z), 1)], -1)
            second = ((1 - torch.exp(-raw[..., 0].relu() * steps)) * raw[..., 1]).sum(-1)
            optimizer.zero_grad()
            (torch.mean((first - target) ** 2) + torch.mean((second - target) ** 2)).backward()
            optimizer.step()

    batch = torch.linspace(2, 6, 6).repeat(8, 1), torch.rand(8)
    return TrainLoop(model={"coarse": coarse, "fine": fine}, optimizer=optimizer, batch=batch, fit=fit)
