"""Trainers that count their epochs, and are over when the count is."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd


class Trainer:
    """A classifier's trainer as projects write it: epochs are counted, validated, and saved with the rest."""

    def __init__(self):
        self.config, self.epoch = SimpleNamespace(accumulate=3, save_every_epochs=3, epochs=3), 0
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)

    def train_epoch(self, loader):
        self.model.train()
        for x, y in loader:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        return sum((self.model(x).argmax(1) == y).float().mean().item() for x, y in loader)

    def train(self, loader):
        while self.epoch < self.config.epochs:
            self.train_epoch(loader)
            self.scheduler.step()
            self.epoch += 1

    def state_dict(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        return {**states, "epoch": self.epoch, "rng": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]
        torch.set_rng_state(state["rng"])


def loop(trainer: Trainer, fit) -> TrainLoop:
    val = [(torch.randn(8, 6), torch.arange(8) % 4)]
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        scheduler=trainer.scheduler,
        batch=(torch.randn(8, 6), torch.arange(8) % 4),
        fit=fit,
        evaluate=lambda: trainer.validate(val),
        save=trainer.state_dict,
        load=trainer.load_state_dict,
    )


@odd(notes="after load() the counted epochs are over and fit takes no batch; validation leaves evaluation mode")
def epochs_are_counted_and_over() -> TrainLoop:
    trainer = Trainer()
    return loop(trainer, trainer.train)


@odd(notes="the test's fit moves the end of training on, so that a resumed trainer trains")
def counted_epochs_that_are_moved_on() -> TrainLoop:
    trainer = Trainer()

    def fit(batches):
        trainer.config.epochs = trainer.epoch + 3
        trainer.train(batches)

    return loop(trainer, fit)
