"""Losses that are not what chance gives before the first step."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop

from . import _data as data
from ._nets import GPT, ConvNet, lm_loss, mlp
from ._pair import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


# The head is drawn with the standard deviation of an embedding.


def language_model(std, **fields):
    def make():
        model = GPT(width=32)
        nn.init.normal_(model.head.weight, std=std)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(optimizer, batches, lambda b: lm_loss(model, b)),
            **fields,
        )

    return make


pair(
    "head_drawn_far_too_wide",
    "O1",
    "loss_at_init",
    "too_high",
    culprits=("cross_entropy",),
    where="return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())",
    mentions=("times what chance gives", "halved"),
    faulty=language_model(8.0),
    fixed=language_model(0.02),
)


# Pixels from 0 to 255 go in as they are; the temperature multiplies them once more.


def image_model(prepare):
    def make():
        model = ConvNet()
        model.features[1], model.features[5] = nn.Identity(), nn.Identity()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        images, labels = data.images()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=((images * 64 + 128).clamp(0, 255), labels),
            fit=lambda batches: train(
                optimizer, batches, lambda b: F.cross_entropy(model(prepare(b[0])) / 0.1, b[1], label_smoothing=0.1)
            ),
        )

    return make


pair(
    "pixels_as_they_are",
    "O1",
    "loss_at_init",
    "inputs_too_large",
    level="advice",
    culprits=("cross_entropy",),
    mentions=("inputs are of size",),
    faulty=image_model(lambda x: x),
    fixed=image_model(lambda x: (x - 128) / 640),
)


# A regression whose last layer is scaled twice.


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.net = mlp(6, 32, 1)
        self.scale = scale

    def forward(self, x):
        return self.scale * self.net(x)


def regression(scale):
    def make():
        model = Scaled(scale)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            fit=lambda batches: train(optimizer, batches, lambda b: F.mse_loss(model(b[0]), b[1])),
        )

    return make


pair(
    "output_scaled_twice",
    "O1",
    "loss_at_init",
    "too_high",
    culprits=("mse_loss",),
    faulty=regression(100.0),
    fixed=regression(1.0),
)


# The project says what it expects.

pair(
    "first_loss_is_not_the_declared_one",
    "O1",
    "loss_at_init",
    "not_as_declared",
    culprits=("init_loss",),
    where="loss_of(batch).backward()",
    faulty=language_model(2.0, init_loss=math.log(16)),
    fixed=language_model(0.02, init_loss=math.log(16)),
)


# The head is drawn a little too wide: advice.

pair(
    "head_drawn_somewhat_too_wide",
    "O1",
    "loss_at_init",
    "above_chance",
    level="advice",
    culprits=("cross_entropy",),
    faulty=language_model(1.5),
    fixed=language_model(0.02),
)


# The labels of a language model are not shifted: with tied weights each token is the best guess for itself.


def tied(shift):
    def make():
        model = GPT(vocab=16, width=32)
        nn.init.normal_(model.token.weight, std=0.5)
        model.head.weight = model.token.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def loss_of(ids):
            inputs, targets = (ids[:, :-1], ids[:, 1:]) if shift else (ids[:, :-1], ids[:, :-1])
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=torch.cat([data.tokens(rows=8)[0], data.tokens(rows=8)[1][:, -1:]], dim=1),
            fit=lambda batches: train(optimizer, batches, loss_of),
        )

    return make


pair(
    "labels_not_shifted",
    "O1",
    "loss_at_init",
    "below_chance",
    level="advice",
    culprits=("cross_entropy",),
    faulty=tied(shift=False),
    fixed=tied(shift=True),
)
