"""Gradients wiped between backward and the step that should consume them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, AutoEncoder, CharLSTM, ConvNet, lm_loss, mlp
from tests.loops.pairs import pair

# A classifier on tabular data.


def train_wiped(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for features, labels in batches:
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()


def train(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for features, labels in batches:
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def tabular(train):
    def make():
        model = mlp(6, 32, 3)
        return TrainLoop(model=model, batch=data.labelled(), fit=lambda batches: train(model, batches))

    return make


pair(
    "tabular_zeroed_after_backward",
    "step_order",
    "zeroed_before_step",
    where="optimizer.zero_grad()",
    faulty=tabular(train_wiped),
    fixed=tabular(train),
)


# A language model; gradients are set to zero in place, so that Adam takes steps of nothing.


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))

    def optimize(self, loss):
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def fit(self, batches):
        for batch in batches:
            self.optimize(lm_loss(self.model, batch))


class TrainerWipingInPlace(Trainer):
    def optimize(self, loss):
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.zero_grad(set_to_none=False)
        self.optimizer.step()


def gpt(trainer_class):
    def make():
        trainer = trainer_class(GPT())
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.tokens(), fit=trainer.fit)

    return make


pair(
    "gpt_zeroed_in_place_before_step",
    "step_order",
    "zeroed_before_step",
    where="zero_grad(set_to_none=False)",
    faulty=gpt(TrainerWipingInPlace),
    fixed=gpt(Trainer),
)


# An image classifier whose update is a helper.


def apply_update_wiping(model, optimizer, loss):
    loss.backward()
    model.zero_grad()
    optimizer.step()


def apply_update(model, optimizer, loss):
    model.zero_grad()
    loss.backward()
    optimizer.step()


def cnn(update):
    def make():
        model = ConvNet().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

        def fit(batches):
            for images, labels in batches:
                update(model, optimizer, F.cross_entropy(model(images), labels, label_smoothing=0.05))

        return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=fit)

    return make


pair(
    "cnn_model_zeroed_before_step",
    "step_order",
    "zeroed_before_step",
    where="model.zero_grad()",
    faulty=cnn(apply_update_wiping),
    fixed=cnn(apply_update),
)


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


def train_lstm_wiped(model, optimizer, batches):
    for ids, targets in batches:
        loss = F.cross_entropy(model(ids).transpose(1, 2), targets)
        loss.backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.detach_().zero_()
        optimizer.step()


def train_lstm(model, optimizer, batches):
    for ids, targets in batches:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.detach_().zero_()
        loss = F.cross_entropy(model(ids).transpose(1, 2), targets)
        loss.backward()
        optimizer.step()


def lstm(train):
    def make():
        model = CharLSTM()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(rows=8),
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


pair(
    "lstm_grads_filled_by_hand",
    "step_order",
    "zeroed_before_step",
    faulty=lstm(train_lstm_wiped),
    fixed=lstm(train_lstm),
)


# Accumulation: at the boundary the window is wiped, then stepped.


def train_accumulating_wiped(model, optimizer, batches, accumulate):
    for i, batch in enumerate(batches, start=1):
        loss = lm_loss(model, batch) / accumulate
        loss.backward()
        if i % accumulate == 0 or i == len(batches):
            optimizer.zero_grad()
            optimizer.step()


def train_accumulating(model, optimizer, batches, accumulate):
    for i, batch in enumerate(batches, start=1):
        loss = lm_loss(model, batch) / accumulate
        loss.backward()
        if i % accumulate == 0 or i == len(batches):
            optimizer.step()
            optimizer.zero_grad()


def accumulating(train):
    def make(accumulate=1):
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(rows=8),
            loss=lm_loss,
            fit=lambda batches: train(model, optimizer, batches, accumulate),
        )

    return make


pair(
    "gpt_window_zeroed_before_step",
    "step_order",
    "zeroed_before_step",
    where="optimizer.zero_grad()",
    faulty=accumulating(train_accumulating_wiped),
    fixed=accumulating(train_accumulating),
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


# Loss scaling: the scaler steps over zeros.


def train_scaled_wiped(model, optimizer, scaler, batches):
    for x, y in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        optimizer.zero_grad(set_to_none=False)
        scaler.step(optimizer)
        scaler.update()


def train_scaled(model, optimizer, scaler, batches):
    for x, y in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def scaled(train):
    def make():
        model = mlp(6, 32, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=data.labelled(),
            fit=lambda batches: train(model, optimizer, scaler, batches),
        )

    return make


pair(
    "scaled_zeroed_before_step",
    "step_order",
    "zeroed_before_step",
    where="optimizer.zero_grad(set_to_none=False)",
    faulty=scaled(train_scaled_wiped),
    fixed=scaled(train_scaled),
)


# Prices as they are: the norm of their gradients overflows in float16, and the clip multiplies by 1 / inf.


def clip_in(dtype):
    def clip(parameters, limit):
        gradients = [p.grad for p in parameters]
        norm = torch.stack([g.to(dtype).pow(2).sum() for g in gradients]).sum().sqrt()
        for g in gradients:
            g.mul_((limit / (norm.float() + 1e-6)).clamp(max=1.0))

    def make():
        model = mlp(6, 32, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        x, y = data.table()

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                clip(list(model.parameters()), 10.0)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(x, 500 * y), fit=fit)

    return make


pair(
    "clip_by_a_norm_that_overflows",
    "step_order",
    "zeroed_before_step",
    culprits=("clip()",),
    mentions=("overflows",),
    where="g.mul_",
    faulty=clip_in(torch.float16),
    fixed=clip_in(torch.float32),
)
