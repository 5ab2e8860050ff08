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


def pretrained_with_a_new_head(trains):
    """Two loaded layers, small trained biases between them, and a head that nothing loads."""

    def make():
        model, generator = Stack(), torch.Generator().manual_seed(4)
        for layer in (model.layer1, model.layer10):
            layer.weight.data = torch.randn(layer.weight.shape, generator=generator).to(layer.weight) * 0.3
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name or (trains and "out" in name))
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        fit = lambda batches: train(model, optimizer, batches, torch.Tensor.backward)  # noqa: E731
        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    return make


pair(
    "new_head_frozen_with_the_loaded_layers",
    "gradient_reaches_every_param",
    "frozen_by_mistake",
    culprits=("out.weight",),
    level="advice",
    faulty=pretrained_with_a_new_head(trains=False),
    fixed=pretrained_with_a_new_head(trains=True),
)
