"""Denoising diffusion of points, with an average of the weights that samples are drawn from."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop

STEPS = 50


class Denoiser(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.inner = nn.Linear(2, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.outer = nn.Linear(width, 2)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x, t):
        return self.outer(self.body(self.inner(x) + self.time(t)))


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for average, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            average.lerp_(weight, 1 - self.decay)


class Trainer:
    def __init__(self):
        self.model = Denoiser()
        self.ema = EMA(self.model, decay=0.995)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0)
        self.kept = torch.cumprod(1 - torch.linspace(1e-4, 0.1, STEPS), 0)

    def loss(self, x):
        t = torch.randint(STEPS, (len(x),))
        noise = torch.randn_like(x)
        kept = self.kept[t, None]
        return F.mse_loss(self.model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t), noise)

    def fit(self, batches):
        self.model.train()
        for (x,) in batches:
            loss = self.loss(x)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.ema.update(self.model)

    def save(self, path):
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state()},
            path / "last.pt",
        )

    def load(self, path):
        state = torch.load(path / "last.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])


def make():
    trainer = Trainer()
    angle = torch.rand(96) * 6.28
    points = torch.stack([angle.cos(), angle.sin()], 1)
    loader = DataLoader(TensorDataset(points), batch_size=16, shuffle=True)
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        batch=next(iter(loader)),
        batches=loader,
        fit=trainer.fit,
        save=trainer.save,
        load=trainer.load,
    )
