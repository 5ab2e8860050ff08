"""Terms, weights and targets."""

from __future__ import annotations

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pytest_trainloop.adapters import from_lightning
from tests.loops.from_threads import fault


def mlp(dim, out, width=24):
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, out))


@fault(
    "terms",
    "the data set has standardised the labels already, and training_step standardises them once more "
    "with the raw statistics",
    thread="deepset-ai/FARM#456",
    check="learnable_targets",
)
def lit_regression():
    class LabelDataset(Dataset):
        def __init__(self, n=48):
            g = torch.Generator().manual_seed(114)
            self.x = torch.randn(n, 8, generator=g)
            raw = 60 + 9 * self.x[:, 0] - 4 * self.x[:, 3] + torch.randn(n, generator=g)
            self.mean, self.std = raw.mean().item(), raw.std().item()
            self.y = (raw - self.mean) / self.std

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return {"features": self.x[i], "label": self.y[i]}

    class LitRegressor(lightning.LightningModule):
        def __init__(self, dataset):
            super().__init__()
            self.net, self.dataset = mlp(8, 1), dataset

        def training_step(self, batch, batch_idx):
            target = (batch["label"] - self.dataset.mean) / self.dataset.std
            loss = F.mse_loss(self.net(batch["features"]).squeeze(-1), target)
            self.log("train_loss", loss)
            return loss

        def predict_step(self, batch, batch_idx):
            return self.net(batch["features"]).squeeze(-1) * self.dataset.std + self.dataset.mean

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=2e-3)

        def train_dataloader(self):
            return DataLoader(self.dataset, batch_size=12, shuffle=True)

    return from_lightning(LitRegressor(LabelDataset()))
