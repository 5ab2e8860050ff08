"""Gradients that are never zeroed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import ConvNet, mlp
from tests.loops.pairs import pair

# An image classifier with batch norm, an epoch as a function.


def train_epoch_unzeroed(model, loader, optimizer, criterion):
    model.train()
    correct = seen = 0
    for images, labels in loader:
        logits = model(images)
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        correct += (logits.argmax(1) == labels).sum().item()
        seen += len(labels)
    return correct / max(seen, 1)


def train_epoch(model, loader, optimizer, criterion):
    model.train()
    correct = seen = 0
    for images, labels in loader:
        optimizer.zero_grad()
        logits = model(images)
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        correct += (logits.argmax(1) == labels).sum().item()
        seen += len(labels)
    return correct / max(seen, 1)


def cnn(epoch):
    def make():
        model = ConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        criterion = nn.CrossEntropyLoss()
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            fit=lambda batches: epoch(model, batches, optimizer, criterion),
        )

    return make


pair("cnn_never_zeroed", "step_order", "not_zeroed", faulty=cnn(train_epoch_unzeroed), fixed=cnn(train_epoch))


def in_windows(zeroed):
    """Windows of one micro-batch, as without accumulation."""

    def epoch(model, loader, optimizer, criterion):
        for window in zip(loader, strict=True):
            for images, labels in window:
                criterion(model(images), labels).backward()
            optimizer.step()
            if zeroed:
                optimizer.zero_grad()

    return epoch


pair(
    "windows_never_zeroed",
    "step_order",
    "not_zeroed",
    change="optimizer.step()",
    mentions=("right after this line",),
    faulty=cnn(in_windows(False)),
    fixed=cnn(in_windows(True)),
)


# The optimizer's step fused into backward, one optimizer per parameter.


def step_in_backward(model, *, zero=True):
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step_and_free(parameter):
        optimizers[parameter].step()
        if zero:
            optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_and_free)
    return list(optimizers.values())


def fused(**how):
    def make():
        model = mlp(6, 32, 3)
        optimizers = step_in_backward(model, **how)

        def fit(batches):
            for x, y in batches:
                F.cross_entropy(model(x), y).backward()

        return TrainLoop(model=model, optimizer=optimizers, batch=data.labelled(), fit=fit)

    return make


pair("step_in_backward_never_zeroed", "step_order", "not_zeroed", faulty=fused(zero=False), fixed=fused())
