"""Running statistics that drift under frozen weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import ConvNet
from tests.loops.pairs import pair

# The features are frozen, and `model.train()` puts their batch norms back to training.


def frozen_features(model):
    for p in model.features.parameters():
        p.requires_grad = False


def train_head(model, optimizer, batches, rest):
    for x, y in batches:
        model.train()
        if rest:
            model.features.eval()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def transfer(rest, declared=()):
    def make():
        model = ConvNet()
        frozen_features(model)
        optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            frozen=declared,
            fit=lambda batches: train_head(model, optimizer, batches, rest),
        )

    return make


pair(
    "features_in_training_mode",
    "frozen_stays_frozen",
    "statistics_drift",
    culprits=("features.1.running_mean", "features.5.running_var"),
    where="model(x)",
    change="model.train()",
    faulty=transfer(rest=False),
    fixed=transfer(rest=True),
)
pair(
    "declared_features_in_training_mode",
    "frozen_stays_frozen",
    "statistics_drift",
    culprits=("features.1.running_mean",),
    faulty=transfer(rest=False, declared=("features.",)),
    fixed=transfer(rest=True, declared=("features.",)),
)


# The first stage frozen after a while, in a trainer that evaluates each epoch and calls train() after it.


class Trainer:
    def __init__(self, model, keep_frozen_in_eval):
        self.model, self.keep = model, keep_frozen_in_eval
        self.frozen = []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def freeze(self, module):
        for p in module.parameters():
            p.requires_grad_(False)
            p.grad = None
        self.frozen.append(module)

    def train_mode(self):
        self.model.train()
        if self.keep:
            for module in self.frozen:
                module.eval()

    def validate(self, batch):
        self.model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(self.model(batch["image"]), batch["label"])
        self.train_mode()
        return loss

    def fit(self, batches):
        self.freeze(self.model.features[:4])
        self.train_mode()
        for step, batch in enumerate(batches, start=1):
            self.optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(self.model(batch["image"]), batch["label"]).backward()
            self.optimizer.step()
            if step % 5 == 0:
                self.validate(batch)


def staged(keep):
    def make():
        trainer = Trainer(ConvNet(), keep)
        images, labels = data.images()
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch={"image": images, "label": labels},
            fit=trainer.fit,
        )

    return make


pair(
    "first_stage_in_training_mode",
    "frozen_stays_frozen",
    "statistics_drift",
    culprits=("features.1.running_mean", "features.1.running_var"),
    faulty=staged(keep=False),
    fixed=staged(keep=True),
)


# A detector's head on a frozen trunk that runs without gradients, still in training mode.


class Detector(nn.Module):
    def __init__(self, resting):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(4))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32, 4))
        self.resting = resting
        self.trunk.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if self.resting:
            self.trunk.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.trunk(x)
        return self.head(features)


def detector(resting):
    def make():
        model = Detector(resting).train()
        optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=fit)

    return make


pair(
    "trunk_without_gradients_in_training_mode",
    "frozen_stays_frozen",
    "statistics_drift",
    culprits=("trunk.1.running_mean",),
    faulty=detector(resting=False),
    fixed=detector(resting=True),
)


# A frozen encoder that normalises what it sees by statistics of its own, as agents do with observations.


class Standardised(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.momentum = momentum
        self.body = nn.Linear(6, 16)

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), self.momentum)
        return self.body(x - self.mean).tanh()


def standardised(evaluating):
    def make():
        encoder = Standardised().requires_grad_(False)
        model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(16, 3)})
        optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)

        def fit(batches):
            model.train()
            if evaluating:
                encoder.eval()
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model["head"](encoder(x)), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, frozen=("encoder.",))

    return make


pair(
    "own_statistics_of_a_frozen_encoder",
    "frozen_stays_frozen",
    "statistics_drift",
    culprits=("encoder.mean",),
    faulty=standardised(evaluating=False),
    fixed=standardised(evaluating=True),
)
