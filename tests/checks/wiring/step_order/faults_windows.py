"""Accumulation windows: zeroed inside, or left over at the end of the data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, CharLSTM, lm_loss
from tests.loops.pairs import pair

# A language model with `accumulate` micro-batches a step.


def train(model, optimizer, batches, accumulate):
    model.train()
    optimizer.zero_grad()
    full = len(batches) // accumulate * accumulate
    for i, batch in enumerate(batches):
        window = accumulate if i < full else len(batches) - full
        loss = lm_loss(model, batch) / window
        loss.backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(batches):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


# A trainer class; `training_step` zeroes, the trainer decides when to step.


@dataclass
class Config:
    lr: float = 3e-3
    grad_accum_steps: int = 1


class Trainer:
    def __init__(self, model, config):
        self.model, self.config = model, config
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
        self.pending = 0

    def training_step(self, ids, targets):
        loss = F.cross_entropy(self.model(ids).transpose(1, 2), targets)
        (loss / self.config.grad_accum_steps).backward()
        self.pending += 1
        return loss.detach()

    def optimizer_step(self):
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.pending = 0

    def fit(self, batches):
        for ids, targets in batches:
            self.training_step(ids, targets)
            if self.pending == self.config.grad_accum_steps:
                self.optimizer_step()
        if self.pending:
            for p in self.model.parameters():
                p.grad.mul_(self.config.grad_accum_steps / self.pending)
            self.optimizer_step()


class TrainerWithoutTail(Trainer):
    def fit(self, batches):
        for ids, targets in batches:
            self.training_step(ids, targets)
            if self.pending == self.config.grad_accum_steps:
                self.optimizer_step()


def lstm(trainer_class, default):
    def make(accumulate=default):
        trainer = trainer_class(CharLSTM(), Config(grad_accum_steps=accumulate))
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.tokens(rows=8), fit=trainer.fit)

    return make


pair(
    "trainer_tail_forgotten",
    "accumulation_equivalence",
    "last_window_lost",
    level="advice",
    faulty=lstm(TrainerWithoutTail, 3),
    fixed=lstm(Trainer, 3),
)


# A window length that is a constant of the project, no knob.

EVERY = 4


def train_autoencoder_zeroed_inside(model, optimizer, batches):
    for i, x in enumerate(batches, start=1):
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        (loss / EVERY).backward()
        if i % EVERY == 0 or i == len(batches):
            optimizer.step()


def train_autoencoder_without_tail(model, optimizer, batches):
    optimizer.zero_grad()
    for i, x in enumerate(batches, start=1):
        loss = F.mse_loss(model(x), x)
        (loss / EVERY).backward()
        if i % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()


def train_autoencoder(model, optimizer, batches):
    remaining = iter(batches)
    while window := list(islice(remaining, EVERY)):
        optimizer.zero_grad()
        for x in window:
            loss = F.mse_loss(model(x), x)
            (loss / len(window)).backward()
        optimizer.step()


def autoencoder(train):
    def make():
        model = AutoEncoder()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table()[0],
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


pair(
    "constant_window_zeroed_inside",
    "step_order",
    "zeroed_inside_window",
    where="optimizer.zero_grad()",
    faulty=autoencoder(train_autoencoder_zeroed_inside),
    fixed=autoencoder(train_autoencoder),
)
pair(
    "constant_window_tail_forgotten",
    "step_order",
    "window_left_over",
    level="advice",
    faulty=autoencoder(train_autoencoder_without_tail),
    fixed=autoencoder(train_autoencoder),
)
