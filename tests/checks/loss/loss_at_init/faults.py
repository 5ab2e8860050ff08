"""Losses that are not at chance level before the first step."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, ConvNet, lm_loss, mlp
from tests.loops.pairs import pair


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
    "loss_at_init",
    "too_high",
    culprits=("cross_entropy",),
    where="return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())",
    change="nn.init.normal_(model.head.weight, std=std)",
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
    "loss_at_init",
    "inputs_too_large",
    level="advice",
    culprits=("cross_entropy",),
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
    "loss_at_init",
    "too_high",
    culprits=("mse_loss",),
    faulty=regression(100.0),
    fixed=regression(1.0),
)


# The project says what it expects.

pair(
    "first_loss_is_not_the_declared_one",
    "loss_at_init",
    "not_as_declared",
    culprits=("expected_init_loss",),
    where="loss_of(batch).backward()",
    faulty=language_model(2.0, expected_init_loss=math.log(16)),
    fixed=language_model(0.02, expected_init_loss=math.log(16)),
)


# The loss is scaled by a scaler, or divided, before it is backpropagated.


def scaled_language_model(std, factor, **fields):
    def make():
        loop = language_model(std, **fields)()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        def fit(batches):
            for batch in batches:
                loop.optimizer.zero_grad()
                loss = lm_loss(loop.model, batch)
                if factor:
                    (loss * factor).backward()
                    loop.optimizer.step()
                else:
                    scaler.scale(loss / 2).backward()
                    scaler.step(loop.optimizer)
                    scaler.update()

        loop.fit = fit
        return loop

    return make


for title, factor in (("by_a_scaler", None), ("by_a_constant", 0.25)):
    pair(
        f"first_loss_scaled_{title}_is_not_the_declared_one",
        "loss_at_init",
        "not_as_declared",
        mentions=("before a factor of",),
        faulty=scaled_language_model(2.0, factor, expected_init_loss=math.log(16)),
        fixed=scaled_language_model(0.02, factor, expected_init_loss=math.log(16)),
    )


# The head is drawn a little too wide: advice.

pair(
    "head_drawn_somewhat_too_wide",
    "loss_at_init",
    "above_chance",
    level="advice",
    culprits=("cross_entropy",),
    faulty=language_model(1.5),
    fixed=language_model(0.02),
)


# The tokens that a masked language model is to fill in are left in its input: each is the best guess for itself.


class Filler(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(17, 32)
        self.rnn = nn.GRU(32, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 17, bias=False)
        nn.init.normal_(self.token.weight, std=0.5)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids)
        return self.head(x + self.rnn(x)[0])


def filled(mask):
    def make():
        model = Filler()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def loss_of(ids):
            hidden = (torch.arange(ids.numel()) % 2 == 0).reshape(ids.shape)
            inputs = ids.masked_fill(hidden, 16) if mask else ids
            return F.cross_entropy(model(inputs)[hidden], ids[hidden])

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(rows=12, length=11)[0],
            fit=lambda batches: train(optimizer, batches, loss_of),
        )

    return make


pair(
    "tokens_to_fill_in_not_masked",
    "loss_at_init",
    "below_chance",
    level="advice",
    culprits=("cross_entropy",),
    faulty=filled(mask=False),
    fixed=filled(mask=True),
)


# The log-odds of a rare positive, without their minus.


def rare_points(bias):
    def make():
        torch.manual_seed(0)
        model = mlp(8, 16, 3)
        nn.init.constant_(model[-1].bias, bias)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x = torch.randn(24, 8)
        y = (x[:, :3] > 1.5).float()
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=(x, y),
            fit=lambda batches: train(
                optimizer, batches, lambda b: F.binary_cross_entropy_with_logits(model(b[0]), b[1])
            ),
        )

    return make


pair(
    "prior_of_a_rare_class_without_its_minus",
    "loss_at_init",
    "prior_inverted",
    quick=True,
    faulty=rare_points(math.log(0.95 / 0.05)),
    fixed=rare_points(-math.log(0.95 / 0.05)),
)
