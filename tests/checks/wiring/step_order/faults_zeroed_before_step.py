"""Gradients wiped between backward and the step that should consume them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import AutoEncoder, mlp
from tests.loops.pairs import pair

# A classifier on tabular data.


def train(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for features, labels in batches:
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Zeroed by hand: set to None in an autoencoder, filled with zero in an LSTM.


def train_autoencoder(model, optimizer, batches, *, clear_after_backward):
    for x, _ in batches:
        if not clear_after_backward:
            clear(model)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        if clear_after_backward:
            clear(model)
        optimizer.step()


def clear(model):
    for parameter in model.parameters():
        parameter.grad = None


def autoencoder(**how):
    def make():
        model = AutoEncoder()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            fit=lambda batches: train_autoencoder(model, optimizer, batches, **how),
        )

    return make


pair(
    "autoencoder_grads_dropped_by_hand",
    "step_order",
    "zeroed_before_step",
    faulty=autoencoder(clear_after_backward=True),
    fixed=autoencoder(clear_after_backward=False),
)


# A GAN whose discriminator never learns.


def train_gan_discriminator_wiped(nets, optimizers, batches):
    for real in batches:
        fake = nets["generator"](torch.randn(len(real), 3))
        loss_d = hinge(nets["discriminator"], real, fake.detach())
        loss_d.backward()
        optimizers["discriminator"].zero_grad()
        optimizers["discriminator"].step()
        loss_g = -nets["discriminator"](fake).mean()
        optimizers["generator"].zero_grad()
        loss_g.backward()
        optimizers["generator"].step()


def train_gan(nets, optimizers, batches):
    for real in batches:
        fake = nets["generator"](torch.randn(len(real), 3))
        loss_d = hinge(nets["discriminator"], real, fake.detach())
        optimizers["discriminator"].zero_grad()
        loss_d.backward()
        optimizers["discriminator"].step()
        loss_g = -nets["discriminator"](fake).mean()
        optimizers["generator"].zero_grad()
        loss_g.backward()
        optimizers["generator"].step()


def hinge(discriminator, real, fake):
    return F.relu(1 - discriminator(real)).mean() + F.relu(1 + discriminator(fake)).mean()


def gan(train):
    def make():
        nets = nn.ModuleDict({"generator": mlp(3, 24, 2), "discriminator": mlp(2, 24, 1)})
        optimizers = {name: torch.optim.Adam(net.parameters(), lr=2e-3) for name, net in nets.items()}
        return TrainLoop(
            model=nets,
            optimizer=optimizers,
            batch=data.ring(),
            fit=lambda batches: train(nets, optimizers, batches),
        )

    return make


pair(
    "gan_discriminator_zeroed_before_step",
    "step_order",
    "zeroed_before_step",
    where='optimizers["discriminator"].zero_grad()',
    faulty=gan(train_gan_discriminator_wiped),
    fixed=gan(train_gan),
)
