"""A CNN on digits: batch norm, momentum, dropout, a step schedule once a pass, a DataLoader that shuffles."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, 10),
    )


def train(model, optimizer, scheduler, loader, epochs=2):
    for _ in range(epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()


def make():
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    labels = torch.arange(48) % 10
    images = torch.randn(48, 1, 8, 8) + labels.view(-1, 1, 1, 1) / 5
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)

    def save():
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=next(iter(loader)),
        batches=loader,
        fit=lambda batches: train(model, optimizer, scheduler, batches),
        save=save,
        load=load,
    )
