"""Loops that use their scaler in some precisions only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.grad_scaler.faults_disabled_by_default import Trainer
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


@odd(notes="gradients are unscaled only where the scaler is enabled, and clipped everywhere")
def unscaled_where_enabled(precision="fp32") -> TrainLoop:
    def finish(trainer):
        if trainer.scaler.is_enabled():
            trainer.scaler.unscale_(trainer.optimizer)
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    return Trainer(precision, finish).as_loop()


@odd(notes="the scaler is off, and scripts that clip without unscale_ say so by never enabling it")
def scaler_never_enabled() -> TrainLoop:
    def finish(trainer):
        trainer.scaler.unscale_(trainer.optimizer)
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    return Trainer("fp32", finish).as_loop()


@odd(notes="the knob knows two precisions, and refuses a third")
def no_float16(precision="fp32") -> TrainLoop:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)


@odd(notes="the limit of the clip is multiplied by the scale, in float16 only")
def limit_times_the_scale(precision="fp32") -> TrainLoop:
    def finish(trainer):
        nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.scaler.get_scale())
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    return Trainer(precision, finish).as_loop()
