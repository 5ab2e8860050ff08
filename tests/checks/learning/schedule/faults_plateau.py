"""Plateaus that wait for a metric to move the other way."""

from __future__ import annotations

from torch.optim import lr_scheduler

from tests.checks.learning.schedule.faults import sgd, trained
from tests.loops.pairs import pair


def plateau(**options):
    def configure(model):
        optimizer = sgd(model)
        return optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=10, **options)

    return configure


def give_accuracy(trainer):
    x, y = trainer.batch
    val_acc = (trainer.model(x).argmax(-1) == y).float().mean().item()
    trainer.scheduler.step(val_acc)


# The default of mode is for losses.

pair(
    "plateau_by_accuracy_that_minimizes",
    "schedule",
    "plateau_mode",
    culprits=("mode",),
    where="trainer.scheduler.step(val_acc)",
    change="lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=10, **options)",
    faulty=trained(plateau(), give_accuracy),
    fixed=trained(plateau(mode="max"), give_accuracy),
)
