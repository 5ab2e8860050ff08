"""Units that are dead or saturated, and with them the layers before them."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def fit_model(model, optimizer, loss_fn, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


@fault(
    "units",
    "SGD at lr=0.1 and momentum 0.9 on targets in the hundreds: the first steps throw the ReLUs below zero, and the "
    "output is a constant",
    thread="keras-team/keras#3687",
    check="activations_alive",
)
def sales_forecast():
    model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.rand(96, 10)
    y = 200 + 100 * x[:, :1] - 50 * x[:, 1:2]
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    criterion = nn.HuberLoss(delta=10.0)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=lambda batches: fit_model(model, optimizer, criterion, batches),
    )


class FocalHead(nn.Module):
    def __init__(self, width=16, classes=3):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.cls_score = nn.Conv2d(width, classes, 3, padding=1)
        self.init_weights()

    def init_weights(self, prior=0.01):
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.constant_(module.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        return self.cls_score(self.tower(x))


def focal_loss(logits, targets, alpha=0.25, gamma=2.0):
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p = torch.sigmoid(logits)
    p_t = p * targets + (1 - p) * (1 - targets)
    weight = alpha * targets + (1 - alpha) * (1 - targets)
    return (weight * (1 - p_t) ** gamma * ce).sum() / targets.sum().clamp(min=1)


@fault(
    "units",
    "the prior bias of -4.6, meant for cls_score, is set on every convolution: the tower's ReLUs never fire",
    thread="kuangliu/pytorch-retinanet#10",
    check="activations_alive",
)
def retina_head():
    model = FocalHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(32, 3, 8, 8)
    targets = (torch.rand(32, 3, 8, 8) < 0.05).float()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(images, targets), batch_size=8, shuffle=True),
        fit=lambda batches: fit_model(model, optimizer, focal_loss, batches),
    )


class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.second = nn.Linear(32, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.tanh(self.hidden(x.flatten(1)))
        x = torch.tanh(self.second(x))
        return self.out(x)


@fault(
    "units",
    "pixels come as bytes from 0 to 255 and are not scaled: every unit of the first tanh layer sits at -1 or 1",
    thread="stats.stackexchange.com/questions/367057",
    check="activations_alive",
)
def digits_from_bytes():
    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pixels = torch.randint(0, 256, (96, 8, 8), dtype=torch.uint8)
    labels = torch.randint(0, 10, (96,))

    def train(batches):
        for images, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.float()), targets)
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(pixels, labels), batch_size=16, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


class PlainMLP(nn.Module):
    """Weights drawn by hand."""

    def __init__(self, sizes=(64, 96, 96, 4)):
        super().__init__()
        shapes = list(itertools.pairwise(sizes))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, m) * n**0.5) for n, m in shapes)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(m)) for _, m in shapes)
        self.activation = nn.Tanh()

    def forward(self, x):
        for w, b in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = self.activation(x @ w + b)
        return x @ self.weights[-1] + self.biases[-1]


@fault(
    "units",
    "weights are drawn with deviation sqrt(n) in place of 1 / sqrt(n): the tanh units are saturated from the start",
    thread="stackoverflow.com/questions/13632976",
    check="activations_alive",
)
def network_by_hand():
    model = PlainMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(96, 64)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16, shuffle=True)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=lambda batches: fit_model(model, optimizer, F.cross_entropy, batches),
    )


class RetentionTime(nn.Module):
    """Predicts a standardized time from counts of residues."""

    def __init__(self, residues=20, width=32):
        super().__init__()
        self.embed = nn.Embedding(residues, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.regressor = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.ReLU())

    def forward(self, peptide):
        return self.regressor(self.rnn(self.embed(peptide))[0][:, -1]).squeeze(1)


@fault(
    "units",
    "the regression ends in a ReLU although standardized targets are mostly below zero: its unit stops firing and the "
    "prediction is 0 for all peptides",
    thread="ProteomicsML/ProteomicsML#203",
    check="activations_alive",
)
def peptide_regression():
    model = RetentionTime()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    peptides = torch.randint(0, 20, (96, 7))
    times = -1.0 + 0.3 * torch.randn(96)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(peptides, times), batch_size=16, shuffle=True),
        fit=lambda batches: fit_model(model, optimizer, F.mse_loss, batches),
    )
