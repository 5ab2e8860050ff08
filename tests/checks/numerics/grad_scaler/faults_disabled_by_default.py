"""Gradient scalers that the loop enables only in float16, or on CUDA: the knob says that the loop can."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Trainer:
    """A trainer as projects write it; ``finish`` makes the step of one iteration."""

    def __init__(self, amp, finish, scaler=None):
        self.model = mlp(6, 32, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.amp, self.finish = amp, finish
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=amp == "fp16", init_scale=2.0**12)

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=DTYPES.get(self.amp, torch.bfloat16), enabled=self.amp in DTYPES):
                loss = F.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.finish(self)

    def as_loop(self):
        return TrainLoop(
            model=self.model, optimizer=self.optimizer, scaler=self.scaler, batch=data.labelled(), fit=self.fit
        )


def unscaled_first(trainer):
    trainer.scaler.unscale_(trainer.optimizer)
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()


def clipped_first(trainer):
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()


def stepped_directly(trainer):
    trainer.optimizer.step()
    trainer.scaler.update()


def stepped_and_updated(trainer):
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()


def in_default(default, finish):
    def make(precision=default):
        return Trainer(precision, finish).as_loop()

    return make


for default in ("fp32", "bf16", "fp16"):
    pair(
        f"clip_before_unscale_where_the_default_is_{default}",
        "grad_scaler",
        "clip_before_unscale",
        where="nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)",
        mentions=("the loss scale of 4096",),
        faulty=in_default(default, clipped_first),
        fixed=in_default(default, unscaled_first),
    )
pair(
    "scaled_gradients_stepped_directly_in_fp16_only",
    "grad_scaler",
    "not_unscaled",
    where="trainer.optimizer.step()",
    faulty=in_default("fp32", lambda t: stepped_directly(t)),
    fixed=in_default("fp32", lambda t: stepped_and_updated(t)),
)


# A scaler for CUDA, which torch disables where there is none.


def on_cuda_only(finish):
    def make():
        return Trainer("fp32", finish, scaler=torch.amp.GradScaler("cuda", init_scale=2.0**10)).as_loop()

    return make


pair(
    "scaler_for_cuda_on_a_cpu",
    "grad_scaler",
    "clip_before_unscale",
    faulty=on_cuda_only(clipped_first),
    fixed=on_cuda_only(unscaled_first),
)
