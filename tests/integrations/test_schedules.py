"""Schedules of trainers: called in another unit than they are built for, and as they should be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from tests.integrations.test_transformers import arguments, gpt2, token_rows, trained

L = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.integration

SCHEDULES = torch.optim.lr_scheduler


def judged(make):
    (result,) = [r for r in check_loop(make, only=["schedule"], raises=False).results if r.check == "schedule"]
    return {f.cause: f.level for f in result.findings}, result


def labelled(rows=32):
    x = torch.randn(rows, 4)
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


class Classifier(L.LightningModule):
    def __init__(self, schedule_of):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.schedule_of = schedule_of

    def train_dataloader(self):
        return DataLoader(labelled(), batch_size=8)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": self.schedule_of(self.trainer, optimizer)}


def by_steps(trainer, optimizer):
    return {
        "scheduler": SCHEDULES.CosineAnnealingLR(optimizer, trainer.estimated_stepping_batches),
        "interval": "step",
    }


def by_epochs(trainer, optimizer):
    return SCHEDULES.CosineAnnealingLR(optimizer, trainer.max_epochs)


def steps_each_epoch(trainer, optimizer):
    """Faulty: Lightning calls a scheduler after an epoch where no interval is given."""
    return SCHEDULES.CosineAnnealingLR(optimizer, trainer.estimated_stepping_batches)


def epochs_each_step(trainer, optimizer):
    """Faulty."""
    return {"scheduler": by_epochs(trainer, optimizer), "interval": "step"}


def every_second_step(trainer, optimizer):
    halved = trainer.estimated_stepping_batches // 2
    return {"scheduler": SCHEDULES.CosineAnnealingLR(optimizer, halved), "interval": "step", "frequency": 2}


def lightning(schedule_of, **settings):
    def make():
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)
        return from_lightning(Classifier(schedule_of), trainer)

    return make


@pytest.mark.parametrize("schedule_of", [steps_each_epoch, epochs_each_step])
def test_lightning_calls_it_in_another_unit(schedule_of):
    found, result = judged(lightning(schedule_of, max_epochs=12))
    assert found == {"counts_something_else": "fault"}, result


@pytest.mark.parametrize("schedule_of", [by_steps, by_epochs, every_second_step])
def test_lightning_calls_it_as_it_is_built(schedule_of):
    found, result = judged(lightning(schedule_of, max_epochs=12))
    assert (found, result.outcome) == ({}, "passed"), result


def test_the_default_length_of_a_lightning_trainer_is_no_plan():
    def make():
        return from_lightning(Classifier(lambda trainer, optimizer: SCHEDULES.CosineAnnealingLR(optimizer, 50)))

    found, result = judged(make)
    assert (found, result.outcome) == ({}, "skipped")
    assert "epochs=" in result.reason


@pytest.fixture
def finetuning(tmp_path):
    def of(accumulate=1, fields=None, **settings):
        def make():
            args = arguments(tmp_path, accumulate, report_to=[], **settings)
            trainer = transformers.Trainer(model=gpt2(), args=args, train_dataset=token_rows())
            return from_trainer(trainer, **(fields or {}))

        return make

    return of


def test_the_length_of_a_trainer(finetuning):
    by_epochs, by_steps = finetuning(accumulate=3, num_train_epochs=2)(), finetuning(max_steps=20)()
    assert (by_epochs.steps, by_epochs.epochs) == (2 * math.ceil(32 / 4 / 3), 2)
    assert (by_steps.steps, by_steps.epochs) == (20, 3)


def test_a_trainer_that_ends_in_its_warm_up(finetuning):
    found, result = judged(finetuning(max_steps=200, warmup_steps=1000, lr_scheduler_type="constant_with_warmup"))
    assert found == {"ends_in_warmup": "fault"}, result


def test_a_trainer_on_little_data_may_be_that_of_a_test(finetuning):
    found, result = judged(finetuning(warmup_steps=1000, lr_scheduler_type="constant_with_warmup"))
    assert found == {"ends_in_warmup": "advice"}, result


def test_a_trainer_whose_warm_up_fits(finetuning):
    for make in (
        finetuning(max_steps=200, warmup_steps=20),
        finetuning(fields={"steps": 5000}, warmup_steps=1000, lr_scheduler_type="constant_with_warmup"),
    ):
        found, result = judged(make)
        assert (found, result.outcome) == ({}, "passed"), result


class OwnSchedule(transformers.Trainer):
    """Faulty where it is built for epochs: ``train()`` calls it after each step."""

    epochs_only = True

    def create_scheduler(self, num_training_steps, optimizer=None):
        length = self.args.num_train_epochs if self.epochs_only else num_training_steps
        self.lr_scheduler = SCHEDULES.CosineAnnealingLR(optimizer or self.optimizer, int(length))
        return self.lr_scheduler


class BySteps(OwnSchedule):
    epochs_only = False


@pytest.mark.parametrize(("kind", "expected"), [(OwnSchedule, {"counts_something_else": "fault"}), (BySteps, {})])
def test_a_trainers_own_schedule(tmp_path, kind, expected):
    found, result = judged(lambda: trained(gpt2(), tmp_path, 1, kind=kind, report_to=[], num_train_epochs=5))
    assert found == expected, result


def accelerated(*, prepare, total):
    """The loop of Accelerate's guide, whose prepared scheduler waits for the end of a window."""

    def make(accumulate=1):
        accelerator = fresh_accelerator(gradient_accumulation_steps=accumulate, cpu=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(labelled(), batch_size=8)
        length = total // accumulate
        scheduler = SCHEDULES.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if prepare:
            scheduler = accelerator.prepare(scheduler)

        def fit(batches):
            for x, y in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit, steps=length)

    return make


@pytest.mark.usefixtures("a_process_without_accelerators")
@pytest.mark.parametrize(("prepare", "expected"), [(False, {"counts_something_else": "fault"}), (True, {})])
def test_accelerates_prepared_scheduler_waits_for_the_window(prepare, expected):
    found, result = judged(accelerated(prepare=prepare, total=1000))
    assert found == expected, result
