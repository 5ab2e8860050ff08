"""Loops that switch single modules by themselves: which part runs in which mode is a declaration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import fresh, images, points


class Pretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
        self.neck = nn.Sequential(nn.Linear(144, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x):
        return self.head(self.neck(self.backbone(x)))


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def loop(fit, model=None, batch=images, rate=0.05):
    model = model or Pretrained()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=batch(),
        batches=fresh(batch),
        fit=lambda batches: fit(model, optimizer, batches),
    )


@odd(notes="the whole net is put in evaluation mode and the head back into training mode, at each epoch")
def switched_whole_off_and_head_on():
    def fit(model, optimizer, batches, epochs=2):
        for _ in range(epochs):
            model.eval()
            model.head.train()
            for x, y in batches:
                step(model, optimizer, x, y)

    return loop(fit)


@odd(notes="evaluation mode for all, then all dropouts on by their class: backbone and norms keep their statistics")
def switched_whole_off_and_dropouts_on():
    def fit(model, optimizer, batches):
        model.eval()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        for x, y in batches:
            step(model, optimizer, x, y)

    return loop(fit)


@odd(notes="all on, then backbone and norms off at each epoch; the part trains with the rest (fine-tuning)")
def switched_whole_on_and_norms_off():
    def fit(model, optimizer, batches, epochs=2):
        for _ in range(epochs):
            model.train()
            model.backbone.eval()
            for module in model.modules():
                if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                    module.eval()
            for x, y in batches:
                step(model, optimizer, x, y)

    return loop(fit)


@odd(notes="the modes are set through the attribute, by a table of the project's own")
def switched_by_attribute():
    def fit(model, optimizer, batches):
        modes = {"backbone": False, "neck": False, "head": True}
        model.eval()
        for name, on in modes.items():
            for module in getattr(model, name).modules():
                module.training = on
        for x, y in batches:
            step(model, optimizer, x, y)

    return loop(fit)


@odd(notes="a validation follows each epoch, and the next one begins with eval() and head.train() again")
def switched_again_after_each_validation():
    def fit(model, optimizer, batches, epochs=2):
        scores = []
        for _ in range(epochs):
            model.eval()
            model.head.train()
            for x, y in batches:
                step(model, optimizer, x, y)
            model.eval()
            with torch.no_grad():
                scores.append((model(x).argmax(1) == y).float().mean().item())

    return loop(fit)


@odd(notes="in evaluation mode but for its recurrent part, which cuDNN trains in training mode only")
def switched_recurrent_part_on():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.embed = nn.Dropout(0.2), nn.Linear(4, 8)
            self.rnn, self.head = nn.GRU(8, 12, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(12, 4)

        def forward(self, x):
            hidden, _ = self.rnn(self.drop(self.embed(x.view(len(x), -1, 4))))
            return self.head(hidden[:, -1])

    def fit(model, optimizer, batches):
        for x, y in batches:
            model.eval()
            model.rnn.train()
            step(model, optimizer, x, y)

    return loop(fit, model=Reader(), batch=points)


@odd(notes="the modes are set where the model is built: all off, the head on")
def switched_when_the_model_is_built():
    model = Pretrained().eval()
    model.head.train()

    def fit(model, optimizer, batches):
        for x, y in batches:
            step(model, optimizer, x, y)

    return loop(fit, model=model)
