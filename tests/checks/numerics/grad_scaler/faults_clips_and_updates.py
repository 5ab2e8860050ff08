"""Clips of gradients that are still scaled; gradient scalers that are never updated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, ConvNet, lm_loss, mlp
from tests.loops.pairs import pair

# Mixed precision with loss scaling.


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def never_unscaled(model, optimizer, scaler):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def unscaled_too_late(model, optimizer, scaler):
    clip(model)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def scaled_values_clipped(model, optimizer, scaler):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def never_updated(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    clip(model)
    scaler.step(optimizer)


def right(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    clip(model)
    scaler.step(optimizer)
    scaler.update()


def train_scaled(model, optimizer, scaler, batches, update):
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        update(model, optimizer, scaler)


def scaled(update, network, batch):
    def make():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=batch(),
            fit=lambda batches: train_scaled(model, optimizer, scaler, batches, update),
        )

    return make


def tabular_net():
    return mlp(6, 32, 3)


pair(
    "mlp_clipped_never_unscaled",
    "grad_scaler",
    "clip_before_unscale",
    where="nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    faulty=scaled(never_unscaled, tabular_net, data.labelled),
    fixed=scaled(right, tabular_net, data.labelled),
)
pair(
    "cnn_unscaled_after_clip",
    "grad_scaler",
    "clip_before_unscale",
    faulty=scaled(unscaled_too_late, ConvNet, data.images),
    fixed=scaled(right, ConvNet, data.images),
)
pair(
    "mlp_scaled_values_clipped",
    "grad_scaler",
    "clip_before_unscale",
    where="clip_grad_value_(model.parameters(), 0.1)",
    faulty=scaled(scaled_values_clipped, tabular_net, data.labelled),
    fixed=scaled(right, tabular_net, data.labelled),
)
pair(
    "mlp_scaler_never_updated",
    "grad_scaler",
    "update_missing",
    raises="unscale_() is being called after step()",
    faulty=scaled(never_updated, tabular_net, data.labelled),
    fixed=scaled(right, tabular_net, data.labelled),
)


# The same in a trainer that accumulates; no clipping, so that torch complains one call later.


class ScaledTrainer:
    def __init__(self, accumulate):
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.accumulate = accumulate

    def optimizer_step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def fit(self, batches):
        for i, batch in enumerate(batches, start=1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = lm_loss(self.model, batch)
            self.scaler.scale(loss / self.accumulate).backward()
            if i % self.accumulate == 0 or i == len(batches):
                self.optimizer_step()


class ScaledTrainerNeverUpdating(ScaledTrainer):
    def optimizer_step(self):
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()


def scaled_gpt(trainer_class):
    def make(accumulate=1):
        trainer = trainer_class(accumulate)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            scaler=trainer.scaler,
            batch=data.tokens(rows=8),
            fit=trainer.fit,
        )

    return make


pair(
    "trainer_scaler_never_updated",
    "grad_scaler",
    "update_missing",
    where="self.scaler.step(self.optimizer)",
    raises="step() has already been called since the last update()",
    faulty=scaled_gpt(ScaledTrainerNeverUpdating),
    fixed=scaled_gpt(ScaledTrainer),
)
