"""Layers that rest although the declaration of what is frozen does not name them; a step without any backward."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(6, 24)
        self.layer10 = nn.Linear(24, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.layer10(torch.tanh(self.layer1(x)))))


def freeze_prefix(model, prefix):
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad_(False)


def train(model, optimizer, batches, backward):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        backward(loss)
        optimizer.step()


def loop(*, prefix=None, backward=torch.Tensor.backward):
    def make():
        model = Stack()
        if prefix:
            freeze_prefix(model, prefix)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            frozen=("layer1.",) if prefix else None,
            fit=lambda batches: train(model, optimizer, batches, backward),
        )

    return make


pair(
    "prefix_matches_layer10_too",
    "gradient_reaches_every_param",
    "frozen_by_mistake",
    culprits=("layer10.weight", "layer10.bias"),
    faulty=loop(prefix="layer1"),
    fixed=loop(prefix="layer1."),
)

pair(
    "backward_without_parentheses",
    "step_order",
    "backward_missing",
    culprits=("loss.backward()",),
    faulty=loop(backward=lambda loss: loss.backward),
    fixed=loop(),
)
