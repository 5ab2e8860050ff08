"""Momentum contrast: two views of each row, a key encoder that follows the query encoder, a queue of negatives."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop


def encoder(inputs=12, width=32, outputs=16):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


class MoCo(nn.Module):
    def __init__(self, queued=64, momentum=0.9, temperature=0.2):
        super().__init__()
        self.query = encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.momentum, self.temperature = momentum, temperature
        self.register_buffer("queue", F.normalize(torch.randn(queued, 16), dim=1))

    @torch.no_grad()
    def follow(self):
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            query.mul_(self.momentum).add_(key, alpha=1 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys):
        self.queue.copy_(torch.cat([keys, self.queue])[: len(self.queue)])

    def forward(self, one, other):
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(other), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach().T], 1) / self.temperature
        self.enqueue(k)
        return logits, torch.zeros(len(q), dtype=torch.long)


def two_views(rows):
    return [rows + 0.1 * torch.randn_like(rows) for _ in range(2)]


def train(model, optimizer, scheduler, loader):
    model.train()
    for (rows,) in loader:
        logits, labels = model(*two_views(rows))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        model.follow()


def make():
    model = MoCo()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    loader = DataLoader(TensorDataset(torch.randn(96, 12)), batch_size=16, shuffle=True, drop_last=True)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=next(iter(loader)),
        batches=loader,
        fit=lambda batches: train(model, optimizer, scheduler, batches),
        frozen=("key.",),
        rows_interact=True,
    )
