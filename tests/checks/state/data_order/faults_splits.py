"""Splits of one data set, each with a transform of its own, or so it looks."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.pairs import pair


class Images(Dataset):
    def __init__(self, transform=None):
        draw = torch.Generator().manual_seed(6)
        self.labels = torch.arange(40) % 3
        self.images = torch.randn(40, 4, 4, generator=draw) + self.labels[:, None, None]
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]


def augment(image):
    return image.flip(-1) if torch.rand(()) < 0.5 else image


def normalise(image):
    return (image - 1) / 1.3


class Augmented(Dataset):
    """A split with a transform of its own."""

    def __init__(self, split, transform):
        self.split, self.transform = split, transform

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        image, label = self.split[index]
        return self.transform(image), label


def classified(prepare):
    """``prepare(train, val)`` gives both splits their transforms."""

    def make():
        splits = random_split(Images(), [32, 8], generator=torch.Generator().manual_seed(0))
        train, val = prepare(*splits) or splits
        loader, validation = DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=8)
        model = nn.Sequential(nn.Flatten(), mlp(16, 24, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def fit(batches):
            for images, labels in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()

        def evaluate():
            with torch.no_grad():
                return sum(float(F.cross_entropy(model(images), labels)) for images, labels in validation)

        return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit, evaluate=evaluate)

    return make


def one_after_the_other(train, val):
    train.dataset.transform = augment
    val.dataset.transform = normalise


def in_a_loop(train, val):
    for split, transform in ((train, augment), (val, normalise)):
        split.dataset.transform = transform


def with_a_copy(train, val):
    val.dataset = copy.copy(val.dataset)
    train.dataset.transform = augment
    val.dataset.transform = normalise


def wrapped(train, val):
    return Augmented(train, augment), Augmented(val, normalise)


# https://github.com/growingnet/gromo/pull/58

pair(
    "transforms_of_two_splits_of_one_data_set",
    "data_order",
    "split_overwrites",
    change="val.dataset.transform = normalise",
    faulty=classified(one_after_the_other),
    fixed=classified(with_a_copy),
    quick=True,
)

pair(
    "transforms_of_splits_in_a_loop",
    "data_order",
    "split_overwrites",
    change="split.dataset.transform = transform",
    faulty=classified(in_a_loop),
    fixed=classified(wrapped),
)


@odd(notes="statistics of the training split are taken with a first transform, and go into the second")
def statistics_before_the_transform():
    def prepare(train, val):
        train.dataset.transform = torch.abs
        scale = torch.stack([image for image, _ in train]).mean()
        val.dataset.transform = lambda image: image / scale

    return classified(prepare)()


@odd(notes="one split is asked twice for its transform, and the second choice is the last")
def one_split_with_two_choices():
    def prepare(train, val):
        train.dataset.transform = normalise
        if len(val) < 10:
            train.dataset.transform = augment

    return classified(prepare)()


@odd(notes="both splits are given the same transform")
def one_transform_for_both_splits():
    def prepare(train, val):
        for split in (train, val):
            split.dataset.transform = normalise

    return classified(prepare)()


@odd(notes="the splits are of two data sets, made with their transforms")
def splits_of_two_data_sets():
    def prepare(train, val):
        train.dataset, val.dataset = Images(), Images()
        train.dataset.transform = augment
        val.dataset.transform = normalise

    return classified(prepare)()
