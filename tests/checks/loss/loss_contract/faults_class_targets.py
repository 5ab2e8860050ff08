"""Targets over classes, and the axis of the classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, CharLSTM, ConvNet, mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


# Labels that torch refuses: the loop does not run through, and the message says why.


def images_with(prepare, classes=4):
    def make():
        model = ConvNet(classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        criterion = nn.CrossEntropyLoss()

        def step(batch):
            images, labels = batch
            return criterion(model(images), prepare(labels))

        return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=lambda b: train(optimizer, b, step))

    return make


def rejected(name, cause, message, prepare, *, mentions=(), fixed=lambda labels: labels):
    pair(
        name,
        "loss_contract",
        cause,
        where="return criterion(model(images), prepare(labels))",
        raises=message,
        mentions=mentions,
        faulty=images_with(prepare),
        fixed=images_with(fixed),
    )


rejected(
    "labels_from_one",
    "target_out_of_range",
    "out of bounds",
    lambda y: y + 1,
)
rejected(
    "labels_beyond_the_head",
    "target_out_of_range",
    "out of bounds",
    lambda y: y * 2,
)
rejected(
    "labels_of_minus_one",
    "target_out_of_range",
    "out of bounds",
    lambda y: torch.where(y == 3, -1, y),
    fixed=lambda y: torch.where(y == 3, -100, y),
)
rejected(
    "labels_in_int32",
    "target_dtype",
    "expected",
    lambda y: y.int(),
)
rejected(
    "labels_as_floats",
    "target_dtype",
    "expected",
    lambda y: y.float(),
)
rejected(
    "labels_as_a_column",
    "target_shape",
    "target",
    lambda y: y[:, None],
)
rejected(
    "one_hot_integers",
    "target_shape",
    "target",
    lambda y: F.one_hot(y, 4),
)


def tagger(scores_of, length=12, model=CharLSTM):
    def make():
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

        def step(batch):
            return F.cross_entropy(scores_of(net(batch["ids"])), batch["tags"])

        ids, _ = data.tokens(length=length)
        return TrainLoop(
            model=net,
            optimizer=optimizer,
            batch={"ids": ids, "tags": (ids * 7) % 16},
            fit=lambda b: train(optimizer, b, step),
        )

    return make


pair(
    "classes_on_the_last_axis",
    "loss_contract",
    "class_axis",
    raises="target",
    faulty=tagger(lambda s: s),
    fixed=tagger(lambda s: s.transpose(1, 2)),
)


def pixels(scores_of):
    def make():
        model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        images, _ = data.images()
        masks = (images[:, 0] > -0.5).long() + (images[:, 0] > 0.5).long()

        def step(batch):
            return F.cross_entropy(scores_of(model(batch[0])), batch[1].view(-1))

        return TrainLoop(
            model=model, optimizer=optimizer, batch=(images, masks), fit=lambda b: train(optimizer, b, step)
        )

    return make


pair(
    "channels_flattened_without_permute",
    "loss_contract",
    "class_axis",
    faulty=pixels(lambda s: s.view(-1, 3)),
    fixed=pixels(lambda s: s.permute(0, 2, 3, 1).reshape(-1, 3)),
)


# One of the batches is all prompt: every label is ignored.


def prompts(loss_of):
    def make():
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids, labels = data.tokens()
        empty = torch.full_like(labels, -100)

        def step(batch):
            return loss_of(model(batch[0]).flatten(0, 1), batch[1].flatten())

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=(ids, labels),
            batches=[(ids, labels), (ids, labels), (ids, empty), (ids, labels)],
            fit=lambda b: train(optimizer, b, step),
        )

    return make


def by_count(scores, labels):
    return F.cross_entropy(scores, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


pair(
    "all_labels_ignored",
    "loss_contract",
    "all_ignored",
    culprits=("ignore_index=-100",),
    faulty=prompts(F.cross_entropy),
    fixed=prompts(by_count),
)


# Soft targets.


def softened(targets_of, **kwargs):
    def make():
        model, teacher = mlp(6, 32, 5), mlp(6, 8, 5)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step(batch):
            with torch.no_grad():
                scores = teacher(batch[0])
            return F.cross_entropy(model(batch[0]), targets_of(batch[1], scores), **kwargs)

        return TrainLoop(
            model={"student": model, "teacher": teacher},
            optimizer=optimizer,
            batch=data.labelled(classes=5),
            fit=lambda b: train(optimizer, b, step),
        )

    return make


def hot(labels, scores):
    return F.one_hot(labels, 5).to(scores.dtype)


def soft_pair(name, faulty, fixed, mentions=()):
    pair(
        name,
        "loss_contract",
        "target_not_distribution",
        where="return F.cross_entropy(model(batch[0]), targets_of",
        mentions=mentions,
        faulty=softened(faulty),
        fixed=softened(fixed),
    )


soft_pair(
    "labels_smoothed_without_the_classes",
    lambda y, s: hot(y, s) * 0.9 + 0.1,
    lambda y, s: hot(y, s) * 0.9 + 0.1 / 5,
    ("1.4",),
)
soft_pair("scores_of_the_teacher_as_targets", lambda y, s: s, lambda y, s: s.softmax(-1), ("negative",))
soft_pair(
    "softmax_of_the_teacher_over_the_rows",
    lambda y, s: s.softmax(0),
    lambda y, s: s.softmax(1),
    ("another axis",),
)
soft_pair(
    "sigmoid_of_the_teacher_as_targets",
    lambda y, s: torch.sigmoid(4 * s),
    lambda y, s: (4 * s).softmax(-1),
    ("a sigmoid gives each class by itself",),
)
soft_pair(
    "softmax_of_the_softmax_of_the_teacher",
    lambda y, s: s.softmax(-1).softmax(-1),
    lambda y, s: s.softmax(-1),
    ("nearly the same for every class",),
)


# A vocabulary of thousands over thirteen characters.


def vocabulary(size):
    def make():
        model = GPT(vocab=size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(batch):
            return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(rows=12),
            fit=lambda b: train(optimizer, b, step),
        )

    return make


pair(
    "head_far_wider_than_the_labels",
    "loss_contract",
    "head_too_wide",
    level="advice",
    faulty=vocabulary(320),
    fixed=vocabulary(16),
)
pair(
    "ids_beyond_the_embedding",
    "loss_contract",
    "ids_out_of_range",
    raises="index out of range",
    culprits=("token",),
    change="self.token = nn.Embedding(vocab, width)",
    faulty=vocabulary(12),
    fixed=vocabulary(16),
)
