"""Fine-tuning of a classifier: the trunk is frozen, its last block and the head train with rates of their own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Classifier(nn.Module):
    def __init__(self, width=24, classes=5):
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def param_groups(model, lr):
    """The head at the full rate, blocks that train at lower ones, the lower the further below."""
    blocks = [
        {"params": block.parameters(), "lr": lr * (depth // len(model.blocks))}
        for depth, block in enumerate(model.blocks)
        if next(block.parameters()).requires_grad
    ]
    return [*blocks, {"params": model.head.parameters(), "lr": lr}]


def train(model, optimizer, scheduler, loader):
    model.train()
    for features, labels in loader:
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        scheduler.step()


def make():
    model = Classifier()
    for part in (model.stem, *model.blocks[:-1]):
        part.requires_grad_(False)
    optimizer = torch.optim.AdamW(param_groups(model, lr=5e-3), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [g["lr"] for g in optimizer.param_groups], total_steps=60
    )
    labels = torch.randint(5, (96,))
    features = torch.randn(96, 16) + F.one_hot(labels, 16)
    loader = DataLoader(TensorDataset(features, labels), batch_size=16, shuffle=True)

    def save():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=next(iter(loader)),
        batches=loader,
        fit=lambda batches: train(model, optimizer, scheduler, batches),
        frozen=("stem.", "blocks.0.", "blocks.1."),
        save=save,
        load=load,
    )
