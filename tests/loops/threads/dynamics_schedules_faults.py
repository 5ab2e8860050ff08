"""Faulty learning rates and schedules, from public threads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


def digits(rows=96, width=16, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    return TensorDataset(centers[labels] + 0.5 * torch.randn(rows, width, generator=generator), labels)


def curve(rows=96, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    return TensorDataset(x, torch.sin(x[:, :1]) + 0.5 * x[:, 1:2])


def mlp(width=16, hidden=32, out=4):
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


class Tagger(nn.Module):
    """A small backbone under a head."""

    def __init__(self, width=16, hidden=32, classes=4):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


@fault(
    "schedules",
    "both schedulers are built on the generator's optimizer: it decays twice, the discriminator's never",
    thread="Lornatang/SRGAN-PyTorch#53",
    check="schedule",
)
def srgan():
    generator, discriminator = mlp(8, 32, 2), mlp(2, 32, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), 1e-3, (0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), 1e-3, (0.5, 0.999))
    g_scheduler = lr_scheduler.StepLR(g_optimizer, step_size=4, gamma=0.5)
    d_scheduler = lr_scheduler.StepLR(g_optimizer, step_size=4, gamma=0.5)
    source = torch.Generator().manual_seed(1)
    real = TensorDataset(torch.randn(64, 2, generator=source) * 0.3 + torch.tensor([1.0, -1.0]))
    loader = DataLoader(real, batch_size=16, shuffle=True)

    def train(batches):
        for (x,) in batches:
            fake = generator(torch.randn(len(x), 8))
            d_optimizer.zero_grad()
            d_real, d_fake = discriminator(x), discriminator(fake.detach())
            d_loss = F.binary_cross_entropy_with_logits(d_real, torch.ones_like(d_real))
            d_loss = d_loss + F.binary_cross_entropy_with_logits(d_fake, torch.zeros_like(d_fake))
            d_loss.backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            score = discriminator(fake)
            g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
            g_loss.backward()
            g_optimizer.step()
            d_scheduler.step()
            g_scheduler.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[g_optimizer, d_optimizer],
        batches=loader,
        fit=train,
    )


@fault(
    "schedules",
    "the scheduler is stepped in train_one_epoch after each image batch and again after the epoch",
    thread="pytorch/vision#1261",
    check="schedule",
)
def detection_reference(epochs=3):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[16, 22], gamma=0.1)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train_one_epoch(batches):
        model.train()
        for images, targets in batches:
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

    def main(batches):
        for _ in range(epochs):
            train_one_epoch(batches)
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=main, epochs=26)


@fault(
    "schedules",
    "StepLR(3, 0.1) is meant in epochs and is stepped after every batch: the rate is gone within the first epoch",
    thread="ivadomed/ivadomed#55",
    check="overfit_one_batch",
)
def gesture_detector(num_epochs=10):
    model = mlp(16, 48, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    loader = DataLoader(digits(), batch_size=8, shuffle=True)

    def run_epoch(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(
        model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=run_epoch, epochs=num_epochs
    )


@fault(
    "schedules",
    "with the schedule switched off gamma is 0 and not 1: after the first four steps the rate is 0 for good",
    thread="LINCellularNeuroscience/VAME#26",
    check="schedule",
)
def rnn_vae(optimizer_scheduler=False):
    class SequenceVAE(nn.Module):
        def __init__(self, width=8, hidden=24, latent=4):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(width, hidden), nn.Linear(latent, width)
            self.mean, self.log_var = nn.Linear(hidden, latent), nn.Linear(hidden, latent)

        def forward(self, x):
            h = torch.tanh(self.encoder(x))
            mean, log_var = self.mean(h), self.log_var(h)
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
            return self.decoder(z), mean, log_var

    model = SequenceVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, amsgrad=True)
    if optimizer_scheduler:
        scheduler = lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.2)
    else:
        scheduler = lr_scheduler.StepLR(optimizer, step_size=4, gamma=0)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def train(batches):
        model.train()
        for x, _ in batches:
            decoded, mean, log_var = model(x)
            kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
            loss = F.mse_loss(decoded, x, reduction="sum") / len(x) + 0.1 * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


@fault(
    "schedules",
    "a new CosineAnnealingLR at the restart takes the rate that has just reached 0 for its base, and stays there",
    thread="pytorch/pytorch#78003",
    check="schedule",
)
def warm_restarts(cycle=4):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    class Run:
        iteration = 0
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, cycle, last_epoch=-1)

    run = Run()

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            run.scheduler.step()
            run.iteration += 1
            if run.iteration % cycle == 0:
                run.scheduler = lr_scheduler.CosineAnnealingLR(optimizer, cycle, last_epoch=-1)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "schedules",
    "the encoder's group starts at rate 0 to be released later, and the schedule multiplies that 0 for ever",
    thread="open-mmlab/mmdetection#8210",
    check="schedule",
)
def gradual_release(epochs=4):
    model = Tagger()
    optimizer = torch.optim.AdamW(
        [{"params": model.backbone.parameters(), "lr": 0.0}, {"params": model.head.parameters(), "lr": 3e-3}]
    )
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    total = len(loader) * epochs
    release = total // 8

    def backbone_factor(step):
        return 0.0 if step < release else 1.0 - (step - release) / (total - release)

    scheduler = lr_scheduler.LambdaLR(optimizer, [backbone_factor, lambda step: max(0.0, 1.0 - step / total)])

    def train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=total)
