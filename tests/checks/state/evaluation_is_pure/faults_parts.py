"""Evaluations that leave a part of the project as evaluation needed it: options of layers, other layers, other nets."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp, relu_mlp
from tests.loops.pairs import pair

CHECK = "evaluation_is_pure"


def classifier(model, evaluate, optimizer=None, before=lambda x: x):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(before(x)), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, evaluate=evaluate)


# Dropout is turned off by its rate, which stays at zero.


def rate_of_dropout(restoring):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
        x, y = data.labelled(seed=5)

        @torch.no_grad()
        def evaluate():
            rates = {m: m.p for m in model.modules() if isinstance(m, nn.Dropout)}
            for layer in rates:
                layer.p = 0.0
            score = (model(x).argmax(1) == y).float().mean().item()
            if restoring:
                for layer, p in rates.items():
                    layer.p = p
            return score

        return classifier(model, evaluate)

    return make


pair(
    "dropout_rate_left_at_zero",
    CHECK,
    "state_left",
    culprits=("model.2.p",),
    where="layer.p = 0.0",
    mentions=("model.2.p was 0.3 before evaluate() and is 0 after it",),
    faulty=rate_of_dropout(restoring=False),
    fixed=rate_of_dropout(restoring=True),
)


# The head is taken off for features, and another one put on.


def headless(restoring):
    def make():
        model = nn.Sequential()
        model.add_module("body", nn.Sequential(nn.Linear(6, 16), nn.Tanh()))
        model.add_module("head", nn.Linear(16, 3))
        x, _ = data.labelled(seed=5)

        @torch.no_grad()
        def features():
            head = model.head
            model.head = nn.Identity()
            found = model(x)
            model.head = head if restoring else nn.Linear(16, 3)
            return found.norm().item()

        return classifier(model, features)

    return make


pair(
    "head_replaced_after_features",
    CHECK,
    "weights_left",
    culprits=("model.head.weight",),
    faulty=headless(restoring=False),
    fixed=headless(restoring=True),
)


# Every parameter is made trainable again after evaluation, also those that were frozen.


def thawed(restoring):
    def make():
        model = nn.Sequential(mlp(6, 16, 16), nn.Tanh(), nn.Linear(16, 3))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = data.labelled(seed=5)

        def evaluate():
            asked = [p.requires_grad for p in model.parameters()]
            model.requires_grad_(False)
            score = F.cross_entropy(model(x), y).item()
            for p, was in zip(model.parameters(), asked, strict=True):
                p.requires_grad_(was if restoring else True)
            return score

        return classifier(model, evaluate, optimizer)

    return make


pair(
    "frozen_body_thawed_by_evaluation",
    CHECK,
    "state_left",
    culprits=("model.0.0.weight.requires_grad",),
    where="p.requires_grad_(was if restoring else True)",
    faulty=thawed(restoring=False),
    fixed=thawed(restoring=True),
)


# Augmentation draws from numpy, and evaluation seeds numpy for its subset.


def subset(own_generator):
    def make():
        model = relu_mlp(6, 16, 3)
        x, y = data.labelled(rows=24, seed=5)

        def noisy(inputs):
            return inputs + torch.as_tensor(np.random.normal(scale=0.3, size=inputs.shape)).to(inputs.dtype)

        @torch.no_grad()
        def evaluate():
            if own_generator:
                rows = np.random.default_rng(0).permutation(len(x))[:12]
            else:
                np.random.seed(0)
                rows = np.random.permutation(len(x))[:12]
            return F.cross_entropy(model(x[rows]), y[rows]).item()

        return classifier(model, evaluate, before=noisy)

    return make


pair(
    "subset_seeds_numpy",
    CHECK,
    "reseeds",
    culprits=("np.random.seed()",),
    where="np.random.seed(0)",
    faulty=subset(own_generator=False),
    fixed=subset(own_generator=True),
)


# Autocast is entered for evaluation, and never left.


def autocast(left):
    def make():
        model = mlp(6, 16, 3)
        x, y = data.labelled(seed=5)

        @torch.no_grad()
        def evaluate():
            context = torch.autocast("cpu", dtype=torch.bfloat16)
            context.__enter__()
            score = F.cross_entropy(model(x), y).item()
            if not left:
                context.__exit__(None, None, None)
            return score

        return classifier(model, evaluate)

    return make


pair(
    "autocast_never_left",
    CHECK,
    "switch_left",
    culprits=("torch.is_autocast_enabled('cpu')",),
    where="context.__enter__()",
    faulty=autocast(left=True),
    fixed=autocast(left=False),
)


# Validation inside `fit` shows samples from one noise, by the global seed.


def shown_inside(own_generator):
    def make():
        net = mlp(4, 16, 2)
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

        def show():
            net.eval()
            with torch.no_grad():
                if own_generator:
                    noise = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
                else:
                    torch.manual_seed(0)
                    noise = torch.randn(4, 4)
                net(noise)
            net.train()

        def fit(batches):
            for number, real in enumerate(batches):
                fake = net(torch.randn(len(real), 4))
                loss = (torch.cdist(fake, real).mean() - 0.5 * torch.cdist(fake, fake).mean()).abs()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if number % 3 == 2:
                    show()

        return TrainLoop(model=net, optimizer=optimizer, batch=data.ring(), fit=fit)

    return make


pair(
    "samples_inside_fit_seed_training",
    CHECK,
    "reseeds",
    where="torch.manual_seed(0)",
    faulty=shown_inside(own_generator=False),
    fixed=shown_inside(own_generator=True),
)
