"""Gradients that are never zeroed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.loop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, AutoEncoder, CharLSTM, ConvNet, TwoTower, contrast, lm_loss, mlp
from tests.loops.pairs import pair

# An image classifier with batch norm, an epoch as a function.


def train_epoch_unzeroed(model, loader, optimizer, criterion):
    model.train()
    correct = seen = 0
    for images, labels in loader:
        logits = model(images)
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        correct += (logits.argmax(1) == labels).sum().item()
        seen += len(labels)
    return correct / max(seen, 1)


def train_epoch_zeroed_when_logging(model, loader, optimizer, criterion, log_every=10):
    model.train()
    for step, (images, labels) in enumerate(loader):
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % log_every == log_every - 1:
            print(f"step {step} loss {loss.item():.4f}")
            optimizer.zero_grad()


def train_epoch(model, loader, optimizer, criterion):
    model.train()
    correct = seen = 0
    for images, labels in loader:
        optimizer.zero_grad()
        logits = model(images)
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        correct += (logits.argmax(1) == labels).sum().item()
        seen += len(labels)
    return correct / max(seen, 1)


def cnn(epoch):
    def make():
        model = ConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        criterion = nn.CrossEntropyLoss()
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            fit=lambda batches: epoch(model, batches, optimizer, criterion),
        )

    return make


pair("cnn_never_zeroed", "step_order", "not_zeroed", faulty=cnn(train_epoch_unzeroed), fixed=cnn(train_epoch))
pair(
    "cnn_zeroed_when_logging",
    "step_order",
    "not_zeroed",
    faulty=cnn(train_epoch_zeroed_when_logging),
    fixed=cnn(train_epoch),
)


# A language model, a trainer class; different batches are given.


class LMTrainer:
    def __init__(self, model, lr=3e-3, clip=1.0):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        self.clip = clip
        self.step = 0

    def training_step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = lm_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    def fit(self, loader):
        self.model.train()
        for batch in loader:
            self.training_step(batch)
            self.step += 1


class LMTrainerUnzeroed(LMTrainer):
    def training_step(self, batch):
        loss = lm_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()


def gpt(trainer_class):
    def make():
        trainer = trainer_class(GPT())
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=data.tokens(),
            batches=lambda n: [data.tokens(seed=i) for i in range(n)],
            loss=lm_loss,
            fit=trainer.fit,
        )

    return make


pair("gpt_trainer_never_zeroed", "step_order", "not_zeroed", faulty=gpt(LMTrainerUnzeroed), fixed=gpt(LMTrainer))


# A GAN: the discriminator's gradients pile up, the generator's own and those of the generator's loss too.


def train_gan_discriminator_unzeroed(generator, discriminator, opt_g, opt_d, batches):
    bce = F.binary_cross_entropy_with_logits
    for real in batches:
        ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 3))
        loss_d = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        loss_g = bce(discriminator(fake), ones)
        loss_g.backward()
        opt_g.step()


def train_gan(generator, discriminator, opt_g, opt_d, batches):
    bce = F.binary_cross_entropy_with_logits
    for real in batches:
        ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 3))
        opt_d.zero_grad()
        loss_d = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        loss_g = bce(discriminator(fake), ones)
        loss_g.backward()
        opt_g.step()


def gan(train):
    def make():
        generator, discriminator = mlp(3, 24, 2), mlp(2, 24, 1)
        opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return TrainLoop(
            model={"generator": generator, "discriminator": discriminator},
            optimizer=[opt_g, opt_d],
            batch=data.ring(),
            fit=lambda batches: train(generator, discriminator, opt_g, opt_d, batches),
        )

    return make


pair(
    "gan_discriminator_never_zeroed",
    "step_order",
    "not_zeroed",
    culprits=("discriminator.0.weight",),
    faulty=gan(train_gan_discriminator_unzeroed),
    fixed=gan(train_gan),
)


# A character LSTM with gradient accumulation.


def train_lstm(model, optimizer, batches, accumulate, *, zero=True):
    model.train()
    window = []
    for batch in batches:
        window.append(batch)
        if len(window) == accumulate:
            update_lstm(model, optimizer, window, zero)
            window = []
    if window:
        update_lstm(model, optimizer, window, zero)


def update_lstm(model, optimizer, window, zero):
    for ids, targets in window:
        loss = F.cross_entropy(model(ids).transpose(1, 2), targets)
        (loss / len(window)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if zero:
        optimizer.zero_grad()


def lstm(**how):
    def make(accumulate=1):
        model = CharLSTM()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(rows=8),
            fit=lambda batches: train_lstm(model, optimizer, batches, accumulate, **how),
        )

    return make


pair("lstm_windows_never_zeroed", "step_order", "not_zeroed", faulty=lstm(zero=False), fixed=lstm())


# An autoencoder; zeroed once, before the loop.


def train_autoencoder_zeroed_once(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    optimizer.zero_grad()
    for batch in batches:
        inputs = batch["x"]
        loss = criterion(model(inputs), inputs)
        loss.backward()
        optimizer.step()


def train_autoencoder(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    for batch in batches:
        optimizer.zero_grad()
        inputs = batch["x"]
        loss = criterion(model(inputs), inputs)
        loss.backward()
        optimizer.step()


def autoencoder(train):
    def make():
        model = AutoEncoder()
        return TrainLoop(model=model, batch={"x": data.table()[0]}, fit=lambda batches: train(model, batches))

    return make


pair(
    "autoencoder_zeroed_once",
    "step_order",
    "not_zeroed",
    faulty=autoencoder(train_autoencoder_zeroed_once),
    fixed=autoencoder(train_autoencoder),
)


# Regression with a closure.


def fit_with_closure(model, optimizer, batches, *, zero=True):
    for x, y in batches:

        def closure(x=x, y=y):
            if zero:
                optimizer.zero_grad()
            loss = F.smooth_l1_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def closure_loop(**how):
    def make():
        model = mlp(6, 24, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            fit=lambda batches: fit_with_closure(model, optimizer, batches, **how),
        )

    return make


pair(
    "closure_never_zeroed",
    "step_order",
    "not_zeroed",
    faulty=closure_loop(zero=False),
    fixed=closure_loop(),
)


# A project that has a function for one batch.


def contrastive_step_unzeroed(model, optimizer, batch):
    loss = contrast(model(*batch))
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach()}


def contrastive_step(model, optimizer, batch):
    loss = contrast(model(*batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach()}


def two_tower(step):
    def make():
        model = TwoTower()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.views(),
            batches=[data.views(seed=i) for i in range(30)],
            step=lambda batch: step(model, optimizer, batch),
        )

    return make


pair(
    "contrastive_step_never_zeroed",
    "step_order",
    "not_zeroed",
    faulty=two_tower(contrastive_step_unzeroed),
    fixed=two_tower(contrastive_step),
)


# The optimizer's step fused into backward, one optimizer per parameter.


def step_in_backward(model, *, zero=True):
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step_and_free(parameter):
        optimizers[parameter].step()
        if zero:
            optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_and_free)
    return list(optimizers.values())


def fused(**how):
    def make():
        model = mlp(6, 32, 3)
        optimizers = step_in_backward(model, **how)

        def fit(batches):
            for x, y in batches:
                F.cross_entropy(model(x), y).backward()

        return TrainLoop(model=model, optimizer=optimizers, batch=data.labelled(), fit=fit)

    return make


pair("step_in_backward_never_zeroed", "step_order", "not_zeroed", faulty=fused(zero=False), fixed=fused())
