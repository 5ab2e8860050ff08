"""Parameters that drop out of the optimizer as a project goes through its phases, or between two optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
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


# A GAN: the discriminator has two parts, only the first is trained.


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2))
        self.score = nn.Linear(24, 1)

    def forward(self, x):
        return self.score(self.body(x))


def gan(trained):
    def make():
        generator, critic = mlp(3, 24, 2), Critic()
        opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        opt_c = torch.optim.Adam(trained(critic), lr=2e-3, betas=(0.5, 0.999))

        def step(real):
            fake = generator(torch.randn(len(real), 3))
            opt_c.zero_grad()
            (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
            opt_c.step()
            opt_g.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            opt_g.step()

        return TrainLoop(
            model={"generator": generator, "critic": critic},
            optimizer={"generator": opt_g, "critic": opt_c},
            batch=data.ring(),
            step=step,
        )

    return make


pair(
    "gan_score_layer_forgotten",
    CHECK,
    "not_in_optimizer",
    culprits=("critic.score.weight", "critic.score.bias"),
    faulty=gan(lambda critic: critic.body.parameters()),
    fixed=gan(lambda critic: critic.parameters()),
)
