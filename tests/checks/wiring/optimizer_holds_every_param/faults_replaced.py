"""Optimizers that hold tensors which the model no longer uses."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, ConvNet, lm_loss, mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop, mse

CHECK = "optimizer_holds_every_param"

# Fine-tuning on other classes: the head is replaced, before or after the optimizer is built.


def train_classifier(model, optimizer, batches):
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


# A language model: new tokens are added, the embedding and the output layer grow.


def resize_token_embeddings(model, vocab):
    for name in ("token", "head"):
        old = getattr(model, name)
        new = nn.Embedding(vocab, 24) if name == "token" else nn.Linear(24, vocab, bias=False)
        with torch.no_grad():
            new.weight.normal_(std=0.1)
            new.weight[: len(old.weight)] = old.weight
        setattr(model, name, new)


class LMTrainer:
    def __init__(self, vocab, *, resize_late):
        self.model = GPT(vocab=12)
        if not resize_late:
            resize_token_embeddings(self.model, vocab)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        if resize_late:
            resize_token_embeddings(self.model, vocab)

    def fit(self, batches):
        for batch in batches:
            loss = lm_loss(self.model, batch)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


def resized(**how):
    def make():
        trainer = LMTrainer(16, **how)
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.tokens(), fit=trainer.fit)

    return make


pair(
    "embedding_resized_after_optimizer",
    CHECK,
    "swapped_after_optimizer",
    culprits=("token.weight", "head.weight"),
    change="self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)",
    faulty=resized(resize_late=True),
    fixed=resized(resize_late=False),
)


# Weight normalisation replaces each weight by two new parameters.


def weight_normed(*, norm_first):
    def make():
        model = mlp(6, 24, 1)
        if norm_first:
            parametrizations.weight_norm(model[0])
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        if not norm_first:
            parametrizations.weight_norm(model[0])
        return loop(model, data.table(), mse, optimizer)

    return make


pair(
    "weight_norm_after_optimizer",
    CHECK,
    "swapped_after_optimizer",
    culprits=("0.parametrizations.weight.original1",),
    faulty=weight_normed(norm_first=False),
    fixed=weight_normed(norm_first=True),
)


# Restarted from a checkpoint: the model is built anew from its config, the optimizer is not.


def rebuild(model):
    fresh = ConvNet()
    fresh.load_state_dict(model.state_dict())
    return fresh


def restarted(*, optimizer_last):
    def make():
        model = ConvNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        model = rebuild(model)
        if optimizer_last:
            optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            fit=lambda batches: train_classifier(model, optimizer, batches),
        )

    return make


pair(
    "model_rebuilt_from_state",
    CHECK,
    "stale_copy",
    culprits=("features.0.weight", "head.weight"),
    faulty=restarted(optimizer_last=False),
    fixed=restarted(optimizer_last=True),
)


# `prepare` returns a copy, and fit goes on with that.


def prepare(model):
    prepared = copy.deepcopy(model)
    prepared.train()
    for p in prepared.parameters():
        p.requires_grad_(True)
    return prepared


def fit_prepared(model, optimizer, batches):
    model = prepare(model)
    train_regression(model, optimizer, batches)


def fit_as_given(model, optimizer, batches):
    model.train()
    train_regression(model, optimizer, batches)


def train_regression(model, optimizer, batches):
    for x, y in batches:
        loss = F.huber_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def prepared(fit):
    def make():
        model = mlp(6, 32, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model, optimizer=optimizer, batch=data.table(), fit=lambda batches: fit(model, optimizer, batches)
        )

    return make


pair(
    "copy_made_inside_fit",
    CHECK,
    "stale_copy",
    faulty=prepared(fit_prepared),
    fixed=prepared(fit_as_given),
)


# A cosine classifier: the class vectors are normalised in each pass.


class CosineHead(nn.Module):
    def __init__(self, width, classes, scale=8.0):
        super().__init__()
        self.linear, self.scale = nn.Linear(width, classes, bias=False), scale

    def forward(self, x):
        return self.scale * F.linear(F.normalize(x), F.normalize(self.linear.weight))


class ReplacingHead(CosineHead):
    def forward(self, x):
        self.linear.weight = nn.Parameter(F.normalize(self.linear.weight.detach()))
        return self.scale * self.linear(F.normalize(x))


def cosine_classifier(head):
    def make():
        model = nn.Sequential(mlp(6, 16, 8), head(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train_classifier(model, optimizer, batches),
        )

    return make


pair(
    "class_vectors_replaced_in_forward",
    CHECK,
    "replaced_in_forward",
    culprits=("1.linear.weight",),
    where="self.linear(F.normalize(x))",
    faulty=cosine_classifier(ReplacingHead),
    fixed=cosine_classifier(CosineHead),
    quick=True,
)
