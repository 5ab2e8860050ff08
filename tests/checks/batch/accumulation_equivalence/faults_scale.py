"""Micro-batches that weigh too much or too little: the loss not divided, divided twice, or divided in part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, lm_loss, mlp
from tests.loops.pairs import pair

# A script's loop: the division was forgotten when accumulation was added.


def train_classifier(model, optimizer, batches, accumulate, divide):
    model.train()
    optimizer.zero_grad()
    for i, (images, labels) in enumerate(batches):
        loss = F.cross_entropy(model(images), labels)
        if divide:
            loss = loss / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(batches):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def classifier(divide):
    def make(accumulate=1):
        model = nn.Sequential(nn.Flatten(), mlp(64, 32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            fit=lambda batches: train_classifier(model, optimizer, batches, accumulate, divide),
        )

    return make


pair(
    "script_loss_not_divided",
    "accumulation_equivalence",
    "loss_not_divided",
    culprits=("loss.backward()",),
    mentions=("2.000",),
    faulty=classifier(divide=False),
    fixed=classifier(divide=True),
)


# A trainer whose two methods both divide.


@dataclass
class Settings:
    lr: float = 3e-3
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0


class LanguageTrainer:
    def __init__(self, model, settings):
        self.model, self.settings = model, settings
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
        self.micro_step = 0

    def compute_loss(self, batch):
        return lm_loss(self.model, batch)

    def backward(self, loss):
        (loss / self.settings.gradient_accumulation_steps).backward()

    def training_step(self, batch):
        loss = self.compute_loss(batch)
        self.backward(loss)
        self.micro_step += 1
        if self.micro_step % self.settings.gradient_accumulation_steps == 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def fit(self, batches):
        self.model.train()
        count = len(batches) // self.settings.gradient_accumulation_steps * self.settings.gradient_accumulation_steps
        for _, batch in zip(range(count), batches, strict=False):
            self.training_step(batch)


class DividesInBothMethods(LanguageTrainer):
    def compute_loss(self, batch):
        return super().compute_loss(batch) / self.settings.gradient_accumulation_steps


def language(trainer_class):
    def make(accumulate=1):
        trainer = trainer_class(GPT(), Settings(gradient_accumulation_steps=accumulate))
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.tokens(), fit=trainer.fit)

    return make


pair(
    "trainer_divides_in_both_methods",
    "accumulation_equivalence",
    "divided_twice",
    culprits=("loss.backward()",),
    mentions=("0.500",),
    faulty=language(DividesInBothMethods),
    fixed=language(LanguageTrainer),
)


# Two optimizers, the second one's loss is not divided.


# Models that draw: an autoencoder with a latent code, and one that learns to take noise away.


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(6, 24, 8), mlp(4, 24, 6)

    def loss(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        code = torch.distributions.Normal(mean, (0.5 * log_var).exp()).rsample()
        divergence = 0.5 * (mean.square() + log_var.exp() - log_var - 1).sum(dim=1)
        return (F.mse_loss(self.decoder(code), x, reduction="none").sum(dim=1) + 0.1 * divergence).mean()


class Denoiser(nn.Module):
    def __init__(self, steps=10):
        super().__init__()
        self.net, self.steps = mlp(7, 32, 6), steps

    def loss(self, x):
        t = torch.randint(0, self.steps, (len(x), 1), device=x.device)
        kept = 1 - (t + 1) / (self.steps + 1)
        noise = torch.randn_like(x)
        noised = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noised, t / self.steps], dim=1)), noise)


def train_generative(model, optimizer, batches, accumulate, divide):
    for i, x in enumerate(batches, start=1):
        loss = model.loss(x)
        (loss / accumulate if divide else loss).backward()
        if i % accumulate == 0 or i == len(batches):
            optimizer.step()
            optimizer.zero_grad()


def generative(build, divide):
    def make(accumulate=1):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(rows=24)[0],
            fit=lambda batches: train_generative(model, optimizer, batches, accumulate, divide),
        )

    return make


for _name, _build in (("vae_not_divided", VAE), ("diffusion_not_divided", Denoiser)):
    pair(
        _name,
        "accumulation_equivalence",
        "loss_not_divided",
        mentions=("2.000",),
        faulty=generative(_build, divide=False),
        fixed=generative(_build, divide=True),
    )


# A loss scale of the project's own is taken off after every micro-batch, off what the earlier ones left too.


def train_scaled(model, optimizer, batches, accumulate, inside, scale=512.0):
    for i, (x, y) in enumerate(batches):
        (scale * F.cross_entropy(model(x), y) / accumulate).backward()
        last = (i + 1) % accumulate == 0 or i + 1 == len(batches)
        if inside or last:
            torch._foreach_div_([p.grad for p in model.parameters()], scale)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def scaled(inside):
    def make(accumulate=1):
        model = mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(rows=24),
            fit=lambda batches: train_scaled(model, optimizer, batches, accumulate, inside),
        )

    return make


pair(
    "scale_taken_off_after_every_micro_batch",
    "accumulation_equivalence",
    "divided_twice",
    faulty=scaled(inside=True),
    fixed=scaled(inside=False),
)
