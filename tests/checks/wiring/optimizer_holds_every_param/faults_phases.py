"""Parameters that drop out of the optimizer as a project goes through its phases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.pairs import pair

CHECK = "optimizer_holds_every_param"

# Fine-tuning: the head first, then the unfrozen trunk too; the optimizer was built while it was frozen.


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU())
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


class FineTuner:
    head_steps = 3

    def __init__(self):
        self.model = Classifier()
        self.model.backbone.requires_grad_(False)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=5e-3)

    def unfreeze(self):
        self.model.backbone.requires_grad_(True)
        self.optimizer.add_param_group({"params": self.model.backbone.parameters(), "lr": 2e-3})

    def fit(self, batches):
        for step, (x, y) in enumerate(batches):
            if step == self.head_steps:
                self.unfreeze()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


class FineTunerForgettingTheGroup(FineTuner):
    def unfreeze(self):
        self.model.backbone.requires_grad_(True)


def fine_tuning(tuner_class):
    def make():
        tuner = tuner_class()
        return TrainLoop(model=tuner.model, optimizer=tuner.optimizer, batch=data.labelled(), fit=tuner.fit)

    return make


pair(
    "unfrozen_without_group",
    CHECK,
    "not_in_optimizer",
    culprits=("backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias"),
    faulty=fine_tuning(FineTunerForgettingTheGroup),
    fixed=fine_tuning(FineTuner),
)
