"""A scheduler that is stepped before its optimizer."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR, LinearLR

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, TwoTower, contrast, lm_loss
from tests.loops.pairs import pair

# Each batch, in a function.


def train_scheduler_first(model, optimizer, scheduler, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = lm_loss(model, batch)
        loss.backward()
        scheduler.step()
        optimizer.step()


def train(model, optimizer, scheduler, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = lm_loss(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()


def warm_up_cosine(step, warm_up=4, total=600, floor=0.1):
    if step < warm_up:
        return (step + 1) / warm_up
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (total - warm_up))))


def gpt(train):
    def make():
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = LambdaLR(optimizer, warm_up_cosine)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            batch=data.tokens(),
            fit=lambda batches: train(model, optimizer, scheduler, batches),
        )

    return make


pair(
    "gpt_scheduler_first",
    "step_order",
    "scheduler_before_optimizer",
    where="scheduler.step()",
    faulty=gpt(train_scheduler_first),
    fixed=gpt(train),
)


# In a trainer, at the start of each batch.


class ContrastiveTrainer:
    def __init__(self):
        self.model = TwoTower()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.scheduler = LinearLR(self.optimizer, start_factor=0.2, total_iters=5)

    def on_batch_start(self):
        self.optimizer.zero_grad()

    def on_batch_end(self):
        self.optimizer.step()
        self.scheduler.step()

    def fit(self, batches):
        for left, right in batches:
            self.on_batch_start()
            contrast(self.model(left, right)).backward()
            self.on_batch_end()


class ContrastiveTrainerSchedulingFirst(ContrastiveTrainer):
    def on_batch_start(self):
        self.scheduler.step()
        self.optimizer.zero_grad()

    def on_batch_end(self):
        self.optimizer.step()


def two_tower(trainer_class):
    def make():
        trainer = trainer_class()
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.scheduler,
            batch=data.views(),
            fit=trainer.fit,
        )

    return make


pair(
    "trainer_scheduler_at_batch_start",
    "step_order",
    "scheduler_before_optimizer",
    where="self.scheduler.step()",
    faulty=two_tower(ContrastiveTrainerSchedulingFirst),
    fixed=two_tower(ContrastiveTrainer),
)
