"""Image classification as timm's train.py does it: mixup, soft targets, autocast, an EMA of the weights, a scheduler
that is driven by ``step_update``, no decay on vectors."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop

CLASSES = 4


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.body = nn.Sequential(
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        )
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.drop(self.body(self.stem(x)).mean((2, 3))))


class ModelEma(nn.Module):
    """The average of weights, with buffers copied."""

    def __init__(self, model, decay=0.9998):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if average.dtype.is_floating_point:
                average.lerp_(value, 1.0 - self.decay)
            else:
                average.copy_(value)


class CosineScheduler:
    """Steps by number of updates and has no ``step()`` for batches, as timm's schedulers."""

    def __init__(self, optimizer, updates, warmup=4, floor=1e-5):
        self.optimizer, self.updates, self.warmup, self.floor = optimizer, updates, warmup, floor
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.step_update(0)

    def step_update(self, num_updates):
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            if num_updates < self.warmup:
                group["lr"] = self.floor + (base - self.floor) * num_updates / self.warmup
            else:
                done = min(1.0, num_updates / self.updates)
                group["lr"] = self.floor + 0.5 * (base - self.floor) * (1 + math.cos(math.pi * done))


def mixup(x, y, alpha=0.2, smoothing=0.1):
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    off = smoothing / CLASSES
    target = F.one_hot(y, CLASSES).to(x.dtype) * (1.0 - smoothing) + off
    return x * lam + x.flip(0) * (1.0 - lam), target * lam + target.flip(0) * (1.0 - lam)


def param_groups(model, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def train_one_epoch(model, ema, loader, optimizer, scheduler, updates, precision):
    model.train()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for x, y in loader:
        x, target = mixup(x, y)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not torch.float32):
            output = model(x)
            loss = torch.sum(-target * F.log_softmax(output.float(), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        ema.update(model)
        updates += 1
        scheduler.step_update(updates)
    return updates


def images(size, seed):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (size,), generator=draw)
    return torch.randn(size, 3, 8, 8, generator=draw) + y[:, None, None, None] * 0.5, y


def make(precision="fp32"):
    model = ConvNet()
    ema = ModelEma(model)
    optimizer = torch.optim.AdamW(param_groups(model, 0.05), lr=4e-3)
    scheduler = CosineScheduler(optimizer, updates=400)
    return TrainLoop(
        model={"model": model, "ema": ema.module},
        optimizer=optimizer,
        scheduler=scheduler,
        batches=lambda n: [images(16, seed) for seed in range(n)],
        fit=lambda batches: train_one_epoch(model, ema, batches, optimizer, scheduler, 0, precision),
        rows_interact=True,
    )
