"""A GAN as a LightningModule that optimizes by hand, for two-dimensional points."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop.adapters import from_lightning


class GAN(lightning.LightningModule):
    def __init__(self, noise=8, width=32):
        super().__init__()
        self.automatic_optimization = False
        self.noise = noise
        self.generator = nn.Sequential(nn.Linear(noise, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch):
        (real,) = batch
        g_optimizer, d_optimizer = self.optimizers()
        fake = self(torch.randn(len(real), self.noise))

        self.toggle_optimizer(g_optimizer)
        g_loss = F.softplus(-self.discriminator(fake)).mean()
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)

        self.toggle_optimizer(d_optimizer)
        d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(d_optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        ]

    def train_dataloader(self):
        points = torch.randn(96, 2) * torch.tensor([1.5, 0.3]) + 1
        return DataLoader(TensorDataset(points), batch_size=16, shuffle=True, drop_last=True)


def make():
    return from_lightning(GAN())
