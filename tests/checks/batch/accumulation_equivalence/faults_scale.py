"""Micro-batches that weigh too much or too little: the loss not divided, divided twice, or divided in part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, AutoEncoder, ConvNet, TwoTower, lm_loss, mlp
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


# A convolutional net with batch norm and dropout, images in a dict.


def train_pictures(model, optimizer, scheduler, batches, accumulate, scale):
    for i, batch in enumerate(batches, start=1):
        logits = model(batch["pixel_values"])
        loss = F.cross_entropy(logits, batch["labels"], label_smoothing=0.1) * scale
        loss.backward()
        if i % accumulate == 0 or i == len(batches):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)


def pictures(scale_of):
    def make(accumulate=1):
        model = nn.Sequential(nn.Dropout(0.1), ConvNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        images, labels = data.images(rows=12)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch={"pixel_values": images, "labels": labels},
            fit=lambda batches: train_pictures(model, optimizer, scheduler, batches, accumulate, scale_of(accumulate)),
        )

    return make


pair(
    "batch_norm_loss_not_divided",
    "accumulation_equivalence",
    "loss_not_divided",
    culprits=("loss.backward()",),
    faulty=pictures(lambda accumulate: 1.0),
    fixed=pictures(lambda accumulate: 1.0 / accumulate),
)


# A penalty is added to the loss after its division.


def penalty(model):
    return 1e-2 * sum(p.square().sum() for p in model.parameters() if p.dim() > 1)


def step_loss(model, x, y, accumulate):
    return (F.mse_loss(model(x), y) + penalty(model)) / accumulate


def step_loss_with_whole_penalty(model, x, y, accumulate):
    return F.mse_loss(model(x), y) / accumulate + penalty(model)


def train_regression(model, optimizer, batches, accumulate, step_loss):
    for i, (x, y) in enumerate(batches, start=1):
        step_loss(model, x, y, accumulate).backward()
        if i % accumulate == 0 or i == len(batches):
            optimizer.step()
            optimizer.zero_grad()


def regression(step_loss):
    def make(accumulate=1):
        model = mlp(6, 32, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            fit=lambda batches: train_regression(model, optimizer, batches, accumulate, step_loss),
        )

    return make


pair(
    "penalty_not_divided",
    "accumulation_equivalence",
    "loss_not_divided",
    mentions=("a term of the loss",),
    faulty=regression(step_loss_with_whole_penalty),
    fixed=regression(step_loss),
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


# Gradients are averaged before the step, of losses that were divided already.


def train_autoencoder(model, optimizer, batches, accumulate, average):
    parameters = list(model.parameters())
    window = []
    for x in batches:
        window.append(x)
        if len(window) < accumulate:
            continue
        optimizer.zero_grad()
        for part in window:
            (F.mse_loss(model(part), part) / len(window)).backward()
        if average:
            for p in parameters:
                p.grad.div_(len(window))
        optimizer.step()
        window = []


def autoencoder(average):
    def make(accumulate=1):
        model = AutoEncoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table()[0],
            fit=lambda batches: train_autoencoder(model, optimizer, list(batches), accumulate, average),
        )

    return make


pair(
    "gradients_averaged_of_divided_losses",
    "accumulation_equivalence",
    "divided_twice",
    faulty=autoencoder(average=True),
    fixed=autoencoder(average=False),
)


# Two optimizers, the second one's loss is not divided.


def train_towers(model, optimizers, batches, accumulate, divide_right):
    for i, (left, right) in enumerate(batches, start=1):
        towards = F.mse_loss(model.left(left), model.right(right).detach())
        back = F.mse_loss(model.right(right), model.left(left).detach())
        (towards / accumulate).backward()
        (back / accumulate if divide_right else back).backward()
        if i % accumulate == 0 or i == len(batches):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def towers(divide_right):
    def make(accumulate=1):
        model = TwoTower()
        optimizers = [
            torch.optim.Adam(model.left.parameters(), lr=1e-3),
            torch.optim.Adam(model.right.parameters(), lr=1e-3),
        ]
        return TrainLoop(
            model=model,
            optimizer=optimizers,
            batch=data.views(),
            fit=lambda batches: train_towers(model, optimizers, batches, accumulate, divide_right),
        )

    return make


pair(
    "second_loss_not_divided",
    "accumulation_equivalence",
    "loss_not_divided",
    faulty=towers(divide_right=False),
    fixed=towers(divide_right=True),
)


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


# The position in the window taken for the number of micro-batches.


def train_divided(model, optimizer, batches, accumulate, divisor):
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / divisor(i, accumulate)
        loss.backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()


def divided(divisor):
    def make(accumulate=1):
        model = mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(rows=24),
            fit=lambda batches: train_divided(model, optimizer, batches, accumulate, divisor),
        )

    return make


pair(
    "divided_by_the_place_in_the_window",
    "accumulation_equivalence",
    "loss_not_divided",
    mentions=("[1, 0.5]", "place in the window"),
    where="loss.backward()",
    faulty=divided(lambda i, accumulate: i % accumulate + 1),
    fixed=divided(lambda _i, accumulate: accumulate),
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
    mentions=("divided by 512 again",),
    faulty=scaled(inside=True),
    fixed=scaled(inside=False),
)
