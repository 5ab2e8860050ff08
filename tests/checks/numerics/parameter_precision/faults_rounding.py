"""Weights and averages in bfloat16 or float16: small updates are rounded away, entry by entry."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, mlp
from tests.loops.pairs import pair

# Plain SGD on bfloat16 weights: nearly all that it does is below their spacing.


def regression(dtype):
    def make():
        model = mlp(6, 48, 48, 1).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.float32):
                    prediction = model(x.to(dtype))
                F.smooth_l1_loss(prediction.float(), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "sgd_on_bfloat16_weights",
    "parameter_precision",
    "updates_lost",
    culprits=("0.weight", "2.weight"),
    mentions=("%", "bfloat16", "typical update"),
    where="optimizer.step()",
    faulty=regression(torch.bfloat16),
    fixed=regression(torch.float32),
)


# Float16 weights, stepped in a closure at a rate that warms up.


class Trainer:
    def __init__(self, half):
        self.half = half
        self.model = mlp(6, 64, 64, 1)
        if half:
            self.model.half()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.2e-3)
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.5, total_iters=8)

    def loss(self, x, y):
        return F.smooth_l1_loss(self.model(x.half() if self.half else x).float(), y)

    def train(self, batches):
        for x, y in batches:

            def closure(x=x, y=y):
                self.optimizer.zero_grad()
                loss = self.loss(x, y)
                loss.backward()
                return loss

            self.optimizer.step(closure)
            self.warmup.step()


def warmed_up(half):
    def make():
        trainer = Trainer(half)
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.table(), fit=trainer.train)

    return make


pair(
    "closures_in_float16_under_warm_up",
    "parameter_precision",
    "updates_lost",
    mentions=("float16",),
    faulty=warmed_up(half=True),
    fixed=warmed_up(half=False),
)


# An autoencoder in bfloat16 at a usual rate: a part of the updates is lost, and it learns all the same.


def reconstruction(dtype):
    def make():
        model = AutoEncoder().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))

        def fit(batches):
            for x, _ in batches:
                loss = F.mse_loss(model(x.to(dtype)).float(), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "a_part_of_the_updates_in_bfloat16",
    "parameter_precision",
    "updates_lost_in_part",
    level="advice",
    mentions=("%",),
    faulty=reconstruction(torch.bfloat16),
    fixed=reconstruction(torch.float32),
)


# A mean teacher in bfloat16 beside a student in float32: with a decay of 0.999 it stays what it was.


@torch.no_grad()
def follow(teacher, student, decay=0.999):
    for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
        t.mul_(decay).add_(s.to(t.dtype), alpha=1 - decay)


def distilled(dtype):
    def make():
        student = mlp(6, 24, 3)
        teacher = copy.deepcopy(student).to(dtype).requires_grad_(False)
        optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

        def fit(batches):
            for x, y in batches:
                with torch.no_grad():
                    soft = teacher(x.to(dtype)).float().softmax(-1)
                logits = student(x)
                loss = F.cross_entropy(logits, y) + 0.1 * F.cross_entropy(logits, soft)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                follow(teacher, student)

        return TrainLoop(
            model={"student": student, "teacher": teacher}, optimizer=optimizer, batch=data.labelled(), fit=fit
        )

    return make


pair(
    "mean_teacher_in_bfloat16",
    "parameter_precision",
    "average_lost",
    culprits=("teacher.0.weight", "teacher.2.weight"),
    where="t.mul_(decay)",
    mentions=("0.001",),
    faulty=distilled(torch.bfloat16),
    fixed=distilled(torch.float32),
)


# torch's own AveragedModel over a bfloat16 network, whose masters are in float32.


def averaged(dtype):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
        low = copy.deepcopy(model).to(dtype)
        average = AveragedModel(low, multi_avg_fn=get_ema_multi_avg_fn(0.9995))
        average.update_parameters(low)  # the first call copies
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for p, master in zip(low.parameters(), model.parameters(), strict=True):
                        p.copy_(master)
                average.update_parameters(low)

        return TrainLoop(
            model={"model": model, "average": average.module}, optimizer=optimizer, batch=data.table(), fit=fit
        )

    return make


pair(
    "averaged_model_in_bfloat16",
    "parameter_precision",
    "average_lost",
    culprits=("average.0.weight", "average.2.weight"),
    faulty=averaged(torch.bfloat16),
    fixed=averaged(torch.float32),
)


# An AdamW of the project's own, which computes in float32 and stores the sum in bfloat16 again.


class AdamW32(torch.optim.Optimizer):
    def __init__(self, params, lr, masters):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8})
        self.masters = masters

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p, dtype=torch.float32))
                    state["v"] = torch.zeros_like(state["m"])
                    if self.masters:
                        state["master"] = p.float()
                state["step"] += 1
                grad = p.grad.float()
                state["m"].lerp_(grad, 1 - b1)
                state["v"].lerp_(grad.square(), 1 - b2)
                m, v = state["m"] / (1 - b1 ** state["step"]), state["v"] / (1 - b2 ** state["step"])
                weights = state["master"] if self.masters else p.float()
                p.copy_(weights.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-group["lr"]))


def own_adamw(masters):
    def make():
        model = mlp(6, 48, 48, 3).bfloat16()
        optimizer = AdamW32(model.parameters(), lr=2e-5, masters=masters)

        def fit(batches):
            for x, y in batches:
                loss = F.cross_entropy(model(x.bfloat16()).float(), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "own_adamw_without_masters",
    "parameter_precision",
    "updates_lost",
    culprits=("0.weight", "2.weight"),
    where="optimizer.step()",
    mentions=("on the same gradient", "bfloat16"),
    faulty=own_adamw(masters=False),
    fixed=own_adamw(masters=True),
)


# Kahan summation whose rest is made anew in every step: it is noted, and never given back.


class KahanSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, rests):
        super().__init__(params, {"lr": lr})
        self.rests = rests

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                rest = self.rests(self.state[p], p)
                update = -group["lr"] * p.grad - rest
                there = p + update
                rest.copy_((there - p) - update)
                p.copy_(there)


def compensated(rests):
    def make():
        model = AutoEncoder().bfloat16()
        optimizer = KahanSGD(model.parameters(), lr=5e-4, rests=rests)

        def fit(batches):
            for x, _ in batches:
                optimizer.zero_grad(set_to_none=True)
                F.mse_loss(model(x.bfloat16()).float(), x).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "kahan_rest_made_anew",
    "parameter_precision",
    "updates_lost",
    faulty=compensated(lambda state, p: torch.zeros_like(p)),
    fixed=compensated(lambda state, p: state.setdefault("rest", torch.zeros_like(p))),
)
