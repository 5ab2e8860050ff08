"""Options of modules and optimizers that were given in the place of others, or by another library's convention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=3e-3)


def classifier(build, optimizer_of=adam, batch=data.labelled):
    """A loop that trains what ``build`` makes."""

    def make():
        model = build()
        optimizer = optimizer_of(model.parameters())
        return TrainLoop(
            model=model, optimizer=optimizer, batch=batch(), fit=lambda batches: train(model, optimizer, batches)
        )

    return make


def two(name, cause, **fields):
    pair(name, "hyperparameters_are_plausible", cause, level="advice", **fields)


def dense(norm):
    """Two layers with what ``norm`` makes between them."""
    return classifier(lambda: nn.Sequential(nn.Linear(6, 24), norm(24), nn.ReLU(), nn.Linear(24, 3)))


# eps in the place of momentum, as PyTorch-GAN's generators have it, and layer norms whose eps has a digit too few.

two(
    "momentum_of_keras_as_eps",
    "norm_eps_too_large",
    culprits=("1",),
    change="nn.BatchNorm1d(width, 0.8)",
    faulty=dense(lambda width: nn.BatchNorm1d(width, 0.8)),
    fixed=dense(lambda width: nn.BatchNorm1d(width, momentum=0.2)),
    quick=True,
)


class Mixer(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.inward = nn.Linear(6, 24)
        self.norms = nn.ModuleList(nn.LayerNorm(24, eps=eps) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        x = self.inward(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return self.head(x)


two(
    "layer_norms_with_an_eps_of_one_tenth",
    "norm_eps_too_large",
    culprits=("norms.0", "norms.1"),
    change="nn.LayerNorm(24, eps=eps)",
    faulty=classifier(lambda: Mixer(1e-1)),
    fixed=classifier(lambda: Mixer(1e-6)),
)


# Momentum by the convention of Keras and TensorFlow.

two(
    "momentum_of_tensorflow",
    "statistics_of_the_last_batch",
    culprits=("1",),
    faulty=dense(lambda width: nn.BatchNorm1d(width, momentum=0.99)),
    fixed=dense(lambda width: nn.BatchNorm1d(width, momentum=0.01)),
    quick=True,
)


class Pictures(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8, **options), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(2)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def pictures(**options):
    return classifier(lambda: Pictures(**options), batch=data.images)


two(
    "darknet_with_a_momentum_of_nine_tenths",
    "statistics_of_the_last_batch",
    culprits=("features.1",),
    change="nn.BatchNorm2d(8, **options)",
    faulty=pictures(momentum=0.9, eps=1e-5),
    fixed=pictures(momentum=0.1, eps=1e-5),
)


# Momentum 0, which a port of Inception gave to all its norms.

two(
    "norms_of_a_ported_inception",
    "statistics_never_move",
    culprits=("features.1",),
    change="nn.BatchNorm2d(8, **options)",
    faulty=pictures(momentum=0, eps=1e-3),
    fixed=pictures(momentum=0.1, eps=1e-3),
    quick=True,
)
two(
    "decay_of_statistics_switched_off",
    "statistics_never_move",
    culprits=("1",),
    faulty=dense(lambda width: nn.BatchNorm1d(width, affine=True, momentum=0.0)),
    fixed=dense(lambda width: nn.BatchNorm1d(width, affine=True, track_running_stats=False)),
)


# The probability to keep, where torch asks for that to drop: in a branch beside which another one learns.


class TwoStreams(nn.Module):
    def __init__(self, dropout, rows=3):
        super().__init__()
        self.near, self.far = mlp(6, 24, rows), nn.Linear(6, rows)
        self.dropout = dropout

    def forward(self, x):
        return self.near(x) + self.dropout(self.far(x))


two(
    "everything_is_kept",
    "dropout_passes_nothing",
    culprits=("dropout",),
    faulty=classifier(lambda: TwoStreams(nn.Dropout(1.0))),
    fixed=classifier(lambda: TwoStreams(nn.Dropout(0.0))),
    quick=True,
)
two(
    "dropout_with_a_switch",
    "dropout_passes_nothing",
    culprits=("dropout",),
    change="nn.Dropout(True)",
    faulty=classifier(lambda: TwoStreams(nn.Dropout(True))),
    fixed=classifier(lambda: TwoStreams(nn.Dropout(0.1, inplace=True))),
)


class Attending(nn.Module):
    """A linear path, and attention over the features beside it."""

    def __init__(self, **options):
        super().__init__()
        self.inward, self.head = nn.Linear(1, 8), nn.Linear(48, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x):
        x = self.inward(x.unsqueeze(-1))
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).flatten(1))


two(
    "dropout_of_attention_with_a_switch",
    "dropout_passes_nothing",
    culprits=("attention",),
    change="nn.MultiheadAttention(8, 2",
    faulty=classifier(lambda: Attending(dropout=True)),
    fixed=classifier(lambda: Attending(dropout=0.1)),
)


# A leaky ReLU that was to work in place.


two(
    "leaky_relu_in_place_by_position",
    "leaky_relu_is_the_identity",
    culprits=("1", "3"),
    change="nn.LeakyReLU(True)",
    faulty=classifier(
        lambda: nn.Sequential(
            nn.Linear(6, 24), nn.LeakyReLU(True), nn.Linear(24, 24), nn.LeakyReLU(True), nn.Linear(24, 3)
        )
    ),
    fixed=classifier(
        lambda: nn.Sequential(
            nn.Linear(6, 24),
            nn.LeakyReLU(inplace=True),
            nn.Linear(24, 24),
            nn.LeakyReLU(inplace=True),
            nn.Linear(24, 3),
        )
    ),
    quick=True,
)


class Encoder(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), activation, nn.Conv2d(8, 8, 3), nn.Flatten())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.convolutions(x))


two(
    "slope_of_a_picture_encoder",
    "leaky_relu_is_the_identity",
    culprits=("convolutions.1",),
    change="nn.LeakyReLU(1.0)",
    faulty=classifier(lambda: Encoder(nn.LeakyReLU(1.0)), batch=data.images),
    fixed=classifier(lambda: Encoder(nn.LeakyReLU(0.1)), batch=data.images),
)


# SGD's arguments by position: lr, momentum, dampening, weight_decay.


def stepped_by(optimizer_of):
    return classifier(lambda: mlp(6, 24, 3), optimizer_of)


class PolyOptimizer(torch.optim.SGD):
    """Of a project that segments pictures: the rate falls with each step."""

    def __init__(self, parameters, lr, weight_decay, most_steps, momentum=0.9, *, named=False):
        given = {"momentum": momentum, "weight_decay": weight_decay}
        super().__init__(parameters, lr, **given) if named else super().__init__(parameters, lr, weight_decay)
        self.count, self.most_steps, self.first = 0, most_steps, lr

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.first * (1 - self.count / self.most_steps) ** 0.9
        self.count += 1
        return super().step(closure)


two(
    "weight_decay_in_the_third_place",
    "weight_decay_given_as_momentum",
    culprits=("momentum",),
    change="PolyOptimizer(",
    faulty=stepped_by(lambda p: PolyOptimizer(p, 0.1, 5e-4, 500)),
    fixed=stepped_by(lambda p: PolyOptimizer(p, 0.1, 5e-4, 500, named=True)),
)
two(
    "weight_decay_in_the_fourth_place",
    "weight_decay_given_as_momentum",
    culprits=("dampening",),
    change="torch.optim.SGD(p, 0.05, 0.9, 5e-4)",
    faulty=stepped_by(lambda p: torch.optim.SGD(p, 0.05, 0.9, 5e-4)),
    fixed=stepped_by(lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=5e-4)),
    quick=True,
)
