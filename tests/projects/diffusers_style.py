"""A class-conditional diffusion model as diffusers' training example: a noise schedule, random timesteps, prediction
of noise, classes dropped for guidance, an EMA of the weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop

STEPS, CLASSES = 100, 4


class NoiseScheduler:
    def __init__(self):
        self.alphas_cumprod = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, STEPS), dim=0)

    def add_noise(self, images, noise, timesteps):
        kept = self.alphas_cumprod.to(images)[timesteps][:, None, None, None]
        return kept.sqrt() * images + (1 - kept).sqrt() * noise


class Residual(nn.Module):
    def __init__(self, width, embedded):
        super().__init__()
        self.norm, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.embed, self.conv2 = nn.Linear(embedded, width), nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x, embedding):
        h = self.conv1(F.silu(self.norm(x)))
        return x + self.conv2(F.silu(h + self.embed(embedding)[:, :, None, None]))


class UNet(nn.Module):
    def __init__(self, width=16, embedded=32):
        super().__init__()
        self.embedded = embedded
        self.time = nn.Sequential(nn.Linear(embedded, embedded), nn.SiLU(), nn.Linear(embedded, embedded))
        self.classes = nn.Embedding(CLASSES + 1, embedded)
        self.enter, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.before, self.middle, self.after = (Residual(width, embedded) for _ in range(3))
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x, timesteps, labels):
        half = self.embedded // 2
        rates = torch.exp(-math.log(10_000) * torch.arange(half, device=x.device) / half)
        angles = timesteps[:, None] * rates[None]
        embedding = self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(x.dtype)) + self.classes(labels)
        skip = self.before(self.enter(x), embedding)
        h = self.after(self.up(self.middle(self.down(skip), embedding)), embedding)
        return self.leave(torch.cat([h, skip], dim=1))


def train(model, average, optimizer, noise_scheduler, batches, drop=0.1):
    model.train()
    for images, labels in batches:
        noise = torch.randn_like(images)
        timesteps = torch.randint(0, STEPS, (len(images),), device=images.device)
        noisy = noise_scheduler.add_noise(images, noise, timesteps)
        dropped = torch.rand(len(labels), device=labels.device) < drop
        predicted = model(noisy, timesteps, torch.where(dropped, CLASSES, labels))
        loss = F.mse_loss(predicted.float(), noise.float())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


def pictures(size, seed):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (size,), generator=draw)
    return torch.randn(size, 3, 8, 8, generator=draw) * 0.2 + labels[:, None, None, None] * 0.2, labels


def make():
    model = UNet()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995), use_buffers=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)
    noise_scheduler = NoiseScheduler()
    return TrainLoop(
        model={"unet": model, "ema": average},
        optimizer=optimizer,
        batches=lambda n: [pictures(8, seed) for seed in range(n)],
        fit=lambda batches: train(model, average, optimizer, noise_scheduler, batches),
    )
