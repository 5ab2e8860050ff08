"""A GAN with Lightning's manual optimization, as its documentation writes it."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop.adapters import from_lightning

LATENT = 8


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, noise):
        return self.generator(noise)

    def adversarial_loss(self, scores, target):
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))

    def training_step(self, batch):
        (data,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        noise = torch.randn(len(data), LATENT, device=self.device)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(noise)), 1.0)
        optimizer_g.zero_grad()
        self.manual_backward(g_loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real = self.adversarial_loss(self.discriminator(data), 1.0)
        fake = self.adversarial_loss(self.discriminator(self(noise).detach()), 0.0)
        d_loss = (real + fake) / 2
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        return [g, d], []


def make():
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) * 0.5 + 1.0
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    return from_lightning(GAN(), trainer, batches=DataLoader(TensorDataset(data), batch_size=16))
