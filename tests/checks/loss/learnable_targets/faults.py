"""Targets that nothing can learn: noise drawn twice, classes cut to one, values out of range, labels written over."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


class Diffusion:
    """DDPM with the noise of a step made in ``q_sample``, as many public repositories have it."""

    def __init__(self, steps=20):
        self.steps = steps
        self.alphas = torch.linspace(0.999, 0.1, steps)

    def q_sample(self, x, t, noise=None):
        noise = torch.randn_like(x) if noise is None else noise
        a = self.alphas[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def given(self, x, t, noise):
        time = t.unsqueeze(1) / self.steps
        return torch.cat([self.q_sample(x, t, noise), time], 1)


def denoising(passes_noise):
    diffusion = Diffusion()

    def loss(model, batch):
        x, _ = batch
        t = torch.randint(0, diffusion.steps, (len(x),))
        noise = torch.randn_like(x)
        predicted = model(diffusion.given(x, t, noise if passes_noise else None))
        return F.mse_loss(predicted, noise)

    return lambda: loop(mlp(7, 32, 6), data.labelled(), loss)


pair(
    "q_sample_draws_its_own_noise",
    "learnable_targets",
    "target_is_other_draw",
    where="F.mse_loss(predicted, noise)",
    change="noise = torch.randn_like(x)",
    faulty=denoising(passes_noise=False),
    fixed=denoising(passes_noise=True),
    quick=True,
)


def flow_matching(again):
    def loss(model, batch):
        x1, _ = batch
        x0, t = torch.randn_like(x1), torch.rand(len(x1), 1)
        xt = (1 - t) * x0 + t * x1
        velocity = x1 - (torch.randn_like(x1) if again else x0)
        return (model(torch.cat([xt, t], 1)) - velocity).pow(2).mean()

    return lambda: loop(mlp(7, 32, 6), data.labelled(), loss)


pair(
    "velocity_to_another_start",
    "learnable_targets",
    "target_is_other_draw",
    where=".pow(2).mean()",
    change="torch.randn_like(x1) if again",
    faulty=flow_matching(again=True),
    fixed=flow_matching(again=False),
)


def score_matching(gives_noisy):
    def loss(model, batch):
        x, _ = batch
        noise = torch.randn_like(x)
        score = model(x + 0.5 * noise if gives_noisy else x)
        return ((0.5 * score + noise) ** 2).sum(1).mean() if gives_noisy else F.mse_loss(score, noise)

    return lambda: loop(mlp(6, 32, 6), data.labelled(), loss)


pair(
    "clean_rows_for_the_denoiser",
    "learnable_targets",
    "noise_not_given",
    level="advice",
    where="F.mse_loss(score, noise)",
    faulty=score_matching(gives_noisy=False),
    fixed=score_matching(gives_noisy=True),
    quick=True,
)


def classes(target):
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), target(y))

    return lambda: loop(mlp(6, 16, 3), data.labelled(), loss)


pair(
    "argmax_over_a_column_of_labels",
    "learnable_targets",
    "target_cut_to_one_value",
    culprits=("batch[1]",),
    where="F.cross_entropy(model(x), target(y))",
    change="y.unsqueeze(1).argmax(1)",
    faulty=classes(lambda y: y.unsqueeze(1).argmax(1)),
    fixed=classes(lambda y: F.one_hot(y).argmax(1)),
    quick=True,
)

pair(
    "shares_cast_to_classes",
    "learnable_targets",
    "target_cut_to_one_value",
    culprits=("batch[1]",),
    change="(y / 4).long()",
    faulty=classes(lambda y: (y / 4).long()),
    fixed=classes(lambda y: (y / 4 * 4).long()),
)


class Classified(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.body = mlp(6, 16, 1)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.body(x))


def regression(activation, target=lambda y: y):
    def loss(model, batch):
        x, y = batch
        return F.mse_loss(model(x), target(y))

    return lambda: loop(Classified(activation), data.table(), loss)


pair(
    "sigmoid_against_grey_levels",
    "learnable_targets",
    "target_out_of_reach",
    where="F.mse_loss(model(x), target(y))",
    faulty=regression(torch.sigmoid, lambda y: 100 + 50 * y),
    fixed=regression(torch.sigmoid, lambda y: (y + 2) / 4),
    quick=True,
)

pair(
    "relu_against_standardised_targets",
    "learnable_targets",
    "target_out_of_reach",
    level="advice",
    where="F.mse_loss(model(x), target(y))",
    faulty=regression(F.relu),
    fixed=regression(lambda x: x),
)


def dice(scores, target, *, copies):
    """Of positions that are not void: those are background for this loss."""
    if copies:
        target = target.clone()
    target[target == 255] = 0
    p = scores.softmax(1)
    wanted = F.one_hot(target, 3).movedim(-1, 1)
    return 1 - (2 * (p * wanted).sum() + 1) / (p.sum() + wanted.sum() + 1)


def segmentation(copies):
    images, _ = data.images(rows=4, size=4)
    masks = torch.arange(64).reshape(4, 4, 4) % 3
    masks[:, 0] = 255

    def loss(model, batch):
        x, y = batch
        scores = model(x)
        overlap = dice(scores, y, copies=copies)
        return overlap + F.cross_entropy(scores, y, ignore_index=255)

    return lambda: loop(nn.Conv2d(1, 3, 3, padding=1), (images, masks), loss)


pair(
    "dice_makes_void_background",
    "learnable_targets",
    "target_written_by_loss",
    culprits=("batch[1]",),
    where="target[target == 255] = 0",
    faulty=segmentation(copies=False),
    fixed=segmentation(copies=True),
    quick=True,
)


def log_probabilities(scores, labels, *, copies):
    """Of each row's labels, as DPO takes them: -100 is filled, and masked out."""
    if copies:
        labels = labels.clone()
    counted = labels != -100
    labels[~counted] = 0
    return (scores.log_softmax(-1).gather(2, labels[..., None])[..., 0] * counted).sum(-1)


def preferences(copies):
    ids, following = data.tokens(rows=6)

    def loss(model, batch):
        ids, following = batch
        labels = torch.where(torch.arange(12) < 5, -100, following)
        scores = model(ids)
        chosen, rejected = log_probabilities(scores, labels, copies=copies).chunk(2)
        likelihood = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return likelihood - F.logsigmoid(0.1 * (chosen - rejected)).mean()

    return lambda: loop(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), (ids, following), loss)


pair(
    "log_probabilities_fill_the_labels",
    "learnable_targets",
    "target_written_by_loss",
    culprits=("labels",),
    where="labels[~counted] = 0",
    faulty=preferences(copies=False),
    fixed=preferences(copies=True),
)


def standardised(target):
    """A table whose targets are standardised by the data set, and constants of the raw ones."""

    def loss(model, batch):
        x, y = batch
        return F.mse_loss(model(x), target(y))

    return lambda: loop(mlp(6, 16, 1), data.table(), loss)


MEAN, STD = 212.0, 40.0

pair(
    "targets_standardised_again",
    "learnable_targets",
    "standardised_twice",
    culprits=("batch[1]",),
    where="F.mse_loss(model(x), target(y))",
    change="(y - MEAN) / STD),",
    faulty=standardised(lambda y: (y - MEAN) / STD),
    fixed=standardised(lambda y: (y * STD + MEAN - MEAN) / STD),
    quick=True,
)

pair(
    "targets_in_raw_units",
    "learnable_targets",
    "target_in_other_units",
    level="advice",
    culprits=("batch[1]",),
    where="F.mse_loss(model(x), target(y))",
    faulty=standardised(lambda y: 10 * y + MEAN),
    fixed=standardised(lambda y: y),
    quick=True,
)


def with_its_target(drop):
    x, y = data.table()
    table = torch.cat([x, y], 1)

    def loss(model, batch):
        given, target = batch
        return F.mse_loss(model(given), target)

    return lambda: loop(mlp(6 if drop else 7, 16, 1), (x if drop else table, y), loss)


pair(
    "target_column_left_in_the_table",
    "learnable_targets",
    "input_contains_target",
    level="advice",
    culprits=("batch[0]", "batch[1]"),
    where="F.mse_loss(model(given), target)",
    faulty=with_its_target(drop=False),
    fixed=with_its_target(drop=True),
    quick=True,
)


# Pairs that belong together and pairs that were shuffled get one label.


class Matching(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = mlp(3, 16, 8), mlp(3, 16, 8)

    def forward(self, left, right):
        return (self.left(left) * self.right(right)).sum(1)


def matching(label, penalty=1e-3):
    def loss(model, batch):
        left, right = batch[0].split(3, 1)
        fits, shuffled = model(left, right), model(left, right.roll(1, 0))
        scores = torch.cat([fits, shuffled])
        sizes = sum(p.pow(2).mean() for p in model.parameters())
        return F.binary_cross_entropy_with_logits(scores, label(scores, fits, shuffled)) + penalty * sizes

    return lambda: loop(Matching(), data.labelled(), loss)


pair(
    "shuffled_pairs_labelled_as_fitting",
    "learnable_targets",
    "one_label_for_all",
    where="F.binary_cross_entropy_with_logits(scores",
    change="torch.ones_like(scores)",
    faulty=matching(lambda scores, fits, shuffled: torch.ones_like(scores)),
    fixed=matching(lambda scores, fits, shuffled: torch.cat([torch.ones_like(fits), torch.zeros_like(shuffled)])),
    quick=True,
)


def two_losses(second):
    def loss(model, batch):
        left, right = batch[0].split(3, 1)
        fits, shuffled = model(left, right).sigmoid(), model(left, right.roll(1, 0)).sigmoid()
        real = F.binary_cross_entropy(fits, torch.full((len(fits),), 1.0))
        return 0.5 * (real + F.binary_cross_entropy(shuffled, torch.full((len(fits),), second)))

    return lambda: loop(Matching(), data.labelled(), loss)


pair(
    "both_losses_ask_for_one",
    "learnable_targets",
    "one_label_for_all",
    mentions=("every target of binary_cross_entropy is 1",),
    faulty=two_losses(1.0),
    fixed=two_losses(0.0),
)
