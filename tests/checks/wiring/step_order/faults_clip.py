"""Clipping where it does nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, CharLSTM
from tests.loops.pairs import pair

# A character LSTM, clipped by norm.


def train_clipping_late(model, optimizer, batches, max_norm=1.0):
    for ids, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).transpose(1, 2), targets)
        loss.backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def train(model, optimizer, batches, max_norm=1.0):
    for ids, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).transpose(1, 2), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def lstm(train):
    def make():
        model = CharLSTM()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(rows=8),
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


pair(
    "lstm_clipped_after_step",
    "step_order",
    "clip_after_step",
    where="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    faulty=lstm(train_clipping_late),
    fixed=lstm(train),
)


# A trainer with overridable hooks; clipped by value.


class Trainer:
    clip_value = 0.5

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def clip(self):
        nn.utils.clip_grad_value_(self.model.parameters(), self.clip_value)

    def update(self):
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fit(self, batches):
        for x, _ in batches:
            F.mse_loss(self.model(x), x).backward()
            self.update()


class TrainerClippingLate(Trainer):
    def update(self):
        self.optimizer.step()
        self.clip()
        self.optimizer.zero_grad()


def autoencoder(trainer_class):
    def make():
        trainer = trainer_class(AutoEncoder())
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.table(), fit=trainer.fit)

    return make


pair(
    "autoencoder_value_clipped_after_step",
    "step_order",
    "clip_after_step",
    where="nn.utils.clip_grad_value_(",
    faulty=autoencoder(TrainerClippingLate),
    fixed=autoencoder(Trainer),
)
