"""Accumulation over a number of micro-batches that stands in the loop itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.batch.accumulation_equivalence.faults_tokens import IGNORED, padded, windows
from tests.loops import data
from tests.loops.nets import GPT, mlp
from tests.loops.pairs import pair

ACCUMULATE = 4


def language_model(train):
    def make():
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model, optimizer=optimizer, batch=padded(), fit=lambda batches: train(model, optimizer, batches)
        )

    return make


def token_losses(model, batch, reduction):
    ids, targets = batch
    logits = model(ids).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def train_mean_of_means(model, optimizer, batches):
    for window in windows(batches, ACCUMULATE):
        for batch in window:
            (token_losses(model, batch, "mean") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_by_tokens(model, optimizer, batches):
    for window in windows(batches, ACCUMULATE):
        count = sum((targets != IGNORED).sum() for _, targets in window)
        for batch in window:
            (token_losses(model, batch, "sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()


pair(
    "four_micro_batches_mean_of_means",
    "accumulation_equivalence",
    "mean_of_means",
    culprits=("loss.backward()",),
    where="backward()",
    level="advice",
    faulty=language_model(train_mean_of_means),
    fixed=language_model(train_by_tokens),
)


# A regression: the gradient is divided after every micro-batch, and what came before with it.


def regression(divide):
    def make():
        model = mlp(6, 16, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def fit(batches):
            for number, (x, y) in enumerate(batches, start=1):
                loss = F.mse_loss(model(x), y)
                divide(model, loss)
                if number % 3 == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


def gradient_divided_each_time(model, loss):
    loss.backward()
    for parameter in model.parameters():
        parameter.grad /= 3


def loss_divided(model, loss):
    (loss / 3).backward()


pair(
    "three_micro_batches_divided_each_time",
    "accumulation_equivalence",
    "divided_twice",
    culprits=("loss.backward()",),
    where="loss.backward()",
    faulty=regression(gradient_divided_each_time),
    fixed=regression(loss_divided),
)
