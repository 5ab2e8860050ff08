"""Rates at which nothing happens, or everything breaks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, AutoEncoder, CharLSTM, lm_loss, mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


# The unit of the config: 0.001 was meant, and divided by a million for a schedule that is gone.


def language_model(rate):
    def make():
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(optimizer, batches, lambda b: lm_loss(model, b)),
        )

    return make


pair(
    "rate_a_million_times_too_low",
    "update_ratio",
    "lr_too_low",
    culprits=("lr",),
    where="optimizer.step()",
    faulty=language_model(1e-9),
    fixed=language_model(1e-3),
)


# The lambda of LambdaLR gives the rate itself, where a factor on it is meant: their product is the rate.


def scheduled(factor):
    def make():
        model = CharLSTM()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 if factor is None else 0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor or (lambda step: 1e-4))

        def fit(batches):
            for ids, targets in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
                optimizer.step()
                schedule.step()

        return TrainLoop(model=model, optimizer=optimizer, scheduler=schedule, batch=data.tokens(), fit=fit)

    return make


pair(
    "schedule_gives_the_rate_where_a_factor_is_meant",
    "update_ratio",
    "lambda_gives_the_lr",
    culprits=("lr",),
    where="schedule.step()",
    change="LambdaLR(",
    mentions=("0.0001 times 0.0001",),
    quick=True,
    faulty=scheduled(None),
    fixed=scheduled(lambda step: 1.0),
)


# Plain gradient descent at a rate from a paper with another scale of losses.


def autoencoder(rate):
    def make():
        model = AutoEncoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

        def loss_of(batch):
            return F.mse_loss(model(batch["x"]), batch["x"], reduction="sum")

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch={"x": data.table()[0]},
            fit=lambda batches: train(optimizer, batches, loss_of),
        )

    return make


pair(
    "rate_too_high_for_a_sum",
    "update_ratio",
    "lr_too_high",
    culprits=("lr",),
    faulty=autoencoder(0.1),
    fixed=autoencoder(1e-3),
    quick=True,
)


# Adam at a rate that belongs to gradient descent: it does not explode, it wanders far above where it began.


def classifier(rate):
    def make():
        model = mlp(6, 32, 32, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(rows=24),
            fit=lambda batches: train(
                optimizer, batches, lambda b: ((model(b[0]).sum(1, keepdim=True) - b[1]) ** 2).mean()
            ),
        )

    return make


pair(
    "adam_at_a_rate_of_gradient_descent",
    "update_ratio",
    "lr_too_high",
    culprits=("lr",),
    faulty=classifier(3.0),
    fixed=classifier(3e-3),
)


# A warm-up that counts in whole numbers: its factor is 0 for a thousand steps, and never in between.


def warmed_up(factor):
    def make():
        model = mlp(6, 32, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                schedule.step()

        return TrainLoop(model=model, optimizer=optimizer, scheduler=schedule, batch=data.labelled(), fit=fit)

    return make


pair(
    "warm_up_in_whole_numbers",
    "update_ratio",
    "lr_too_low",
    culprits=("lr",),
    faulty=warmed_up(lambda step: min(1, step // 1000)),
    fixed=warmed_up(lambda step: min(1, step / 10)),
    quick=True,
)


# A trunk from a checkpoint and a fresh head, in one group.


def fine_tuned(groups):
    def make():
        model = nn.ModuleDict({"trunk": mlp(6, 32, 32, 16), "head": nn.Linear(16, 3)})
        checkpoint = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model["trunk"].parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=checkpoint))
        optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(
                optimizer, batches, lambda b: F.cross_entropy(model["head"](model["trunk"](b[0])), b[1])
            ),
        )

    return make


pair(
    "one_rate_for_trunk_and_head",
    "update_ratio",
    "same_lr_for_pretrained_and_new",
    level="advice",
    culprits=("head.weight",),
    faulty=fine_tuned(lambda model: model.parameters()),
    fixed=fine_tuned(
        lambda model: [
            {"params": model["trunk"].parameters(), "lr": 1e-4},
            {"params": model["head"].parameters(), "lr": 3e-3},
        ]
    ),
)


# A sign too few in the config: eps of 1e8, and every step is lr / eps.


def settings(eps):
    def make():
        model = mlp(6, 32, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=eps)

        def loss_of(batch):
            return F.cross_entropy(model(batch[0]), batch[1])

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(optimizer, batches, loss_of),
        )

    return make


pair(
    "eps_of_1e8",
    "update_ratio",
    "eps_too_large",
    culprits=("eps",),
    where="optimizer.step()",
    mentions=("1e+08",),
    faulty=settings(1e8),
    fixed=settings(1e-8),
)
