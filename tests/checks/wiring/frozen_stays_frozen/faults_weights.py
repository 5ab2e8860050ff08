"""Frozen parameters that move: by decay, by momentum, by an old gradient, or because they still train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, mlp
from tests.loops.pairs import pair

# Fine-tuning: the backbone's gradients are set to zero where they should be None, and AdamW decays its weights.


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = mlp(6, 24, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))


def fine_tune(model, optimizer, batches, clear):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.backbone.parameters():
            clear(p)
        optimizer.step()


def set_to_zero(p):
    p.grad.zero_()


def set_to_none(p):
    p.grad = None


def fine_tuned(clear):
    def make():
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            frozen=("backbone.",),
            fit=lambda batches: fine_tune(model, optimizer, batches, clear),
        )

    return make


pair(
    "gradients_zeroed_under_decay",
    "frozen_stays_frozen",
    "weight_decay",
    culprits=("backbone.0.weight", "backbone.2.weight"),
    where="optimizer.step()",
    faulty=fine_tuned(set_to_zero),
    fixed=fine_tuned(set_to_none),
)


# Embeddings frozen after some steps: requires_grad is off, a zeroed gradient stays, and SGD decays.


# Encoder frozen in the middle of the training; Adam's moments move it on.


def train_then_freeze(model, batches, rebuild):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, x in enumerate(batches):
        if step == 4:
            for p in model.encoder.parameters():
                p.requires_grad_(False)
            if rebuild:
                optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def autoencoder(rebuild):
    def make():
        model = AutoEncoder()
        return TrainLoop(
            model=model, batch=data.table()[0], fit=lambda batches: train_then_freeze(model, batches, rebuild)
        )

    return make


pair(
    "moments_kept_when_freezing",
    "frozen_stays_frozen",
    "momentum",
    culprits=("encoder.0.weight",),
    faulty=autoencoder(rebuild=False),
    fixed=autoencoder(rebuild=True),
)


# Alternating phases: the other half's gradients are zeroed, and momentum runs on.


# Rows of an embedding are held by a hook that masks their gradient, and AdamW decays them.


class WordModel(nn.Module):
    def __init__(self, held=8):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), mlp(8, 16, 4)
        mask = (torch.arange(12) >= held).float().unsqueeze(1)
        self.embed.weight.register_hook(lambda gradient: gradient * mask)

    def forward(self, ids):
        return self.head(self.embed(ids))


def held_rows(decay):
    def make():
        model = WordModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)

        def fit(batches):
            for ids, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(ids), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.arange(12), torch.arange(12) % 4), fit=fit)

    return make


pair(
    "old_rows_of_an_embedding_decay",
    "frozen_stays_frozen",
    "weight_decay",
    culprits=("embed.weight",),
    mentions=("64 entries of embed.weight",),
    faulty=held_rows(0.01),
    fixed=held_rows(0.0),
)


# Filters are pruned after some steps: a mask on the gradients, and the momentum moves them away from zero.


def prune_and_train(model, optimizer, batches, again):
    mask = torch.ones(24, 1)
    for step, (x, y) in enumerate(batches):
        if step == 3:
            mask[:6] = 0.0
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.backbone[0].weight.grad.mul_(mask)
        if step == 3:
            model.backbone[0].weight.data.mul_(mask)
        optimizer.step()
        if again:
            model.backbone[0].weight.data.mul_(mask)


def pruned(again):
    def make():
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: prune_and_train(model, optimizer, batches, again),
        )

    return make


pair(
    "pruned_filters_move_on",
    "frozen_stays_frozen",
    "momentum",
    culprits=("backbone.0.weight",),
    mentions=("from zero",),
    faulty=pruned(again=False),
    fixed=pruned(again=True),
)


# Frozen after a backward pass; nothing clears the gradient that pass left, since only the head's are zeroed.


def freeze_during_training(model, optimizer, batches, clear):
    for step, (x, y) in enumerate(batches):
        model.head.zero_grad()
        if step < 3:
            model.backbone.zero_grad()
        if step == 3:
            model.backbone.requires_grad_(False)
            if clear:
                model.backbone.zero_grad()
                for p in model.backbone.parameters():
                    p.grad = None
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def frozen_later(clear):
    def make():
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: freeze_during_training(model, optimizer, batches, clear),
        )

    return make


pair(
    "gradient_left_when_freezing",
    "frozen_stays_frozen",
    "stale_gradient",
    culprits=("backbone.0.weight", "backbone.2.bias"),
    where="optimizer.step()",
    faulty=frozen_later(clear=False),
    fixed=frozen_later(clear=True),
)


# Declared frozen, and frozen under another name than the model's.


def frozen_by_prefix(prefix):
    def make():
        model = Classifier()
        for name, p in model.named_parameters():
            if name.startswith(prefix):
                p.requires_grad = False
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), frozen=("backbone.",), fit=fit)

    return make


pair(
    "frozen_prefix_of_a_wrapped_model",
    "frozen_stays_frozen",
    "still_trainable",
    culprits=("backbone.0.weight", "backbone.0.bias", "backbone.2.weight", "backbone.2.bias"),
    where="optimizer.step()",
    faulty=frozen_by_prefix("model.backbone."),
    fixed=frozen_by_prefix("backbone."),
)
