"""Adversarial training in the order of well-known public code: the generator steps first and reads no data."""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import images

LATENT, CLASSES, CODES = 8, 4, 2


def drawn(*shape):
    """Noise that numpy draws, as this code does."""
    return torch.as_tensor(np.random.normal(0, 1, shape), dtype=torch.get_default_dtype())


def initialise(module):
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def one_hot(labels):
    return F.one_hot(labels, CLASSES).to(torch.get_default_dtype())


class Generator(nn.Module):
    def __init__(self, inputs=LATENT):
        super().__init__()
        self.l1 = nn.Linear(inputs, 8 * 2 * 2)
        self.conv_blocks = nn.Sequential(
            nn.BatchNorm2d(8),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 8, 3, stride=1, padding=1),
            nn.BatchNorm2d(8, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 1, 3, stride=1, padding=1),
            nn.Tanh(),
        )

    def forward(self, *given):
        return self.conv_blocks(self.l1(torch.cat(given, -1)).view(-1, 8, 2, 2))


class Discriminator(nn.Module):
    """Scores of a picture, the first of them through a sigmoid where ``heads`` is one."""

    def __init__(self, heads=(1,), sigmoid=True, channels=1):
        super().__init__()
        self.conv_blocks = nn.Sequential(
            nn.Conv2d(channels, 8, 3, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout2d(0.25),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout2d(0.25),
            nn.BatchNorm2d(16, 0.8),
        )
        self.heads = nn.ModuleList(nn.Linear(16 * 2 * 2, size) for size in heads)
        self.sigmoid = sigmoid

    def forward(self, *given):
        out = self.conv_blocks(torch.cat(given, 1)).flatten(1)
        found = [head(out) for head in self.heads]
        if self.sigmoid:
            found[0] = found[0].sigmoid()
        return found[0] if len(found) == 1 else tuple(found)


def adversaries(train, generator, discriminator, *, draw=images, rate=2e-3, betas=(0.5, 0.999), chained=False):
    """The loop of a generator and a discriminator with an optimizer each, and one of both where ``chained``."""
    nets = {"generator": generator.apply(initialise), "discriminator": discriminator.apply(initialise)}
    optimizers = [torch.optim.Adam(net.parameters(), lr=rate, betas=betas) for net in nets.values()]
    if chained:
        both = itertools.chain(*(net.parameters() for net in nets.values()))
        optimizers.append(torch.optim.Adam(both, lr=rate, betas=betas))

    def fit(batches):
        for batch in batches:
            train(*nets.values(), *optimizers, batch)

    return TrainLoop(
        model=nets, optimizer=optimizers, batch=draw(), batches=lambda n: [draw() for _ in range(n)], fit=fit
    )


@odd(notes="the generator steps before any model saw a picture, and labels of the data set are left out")
def generator_steps_first() -> TrainLoop:
    def train(generator, discriminator, optimizer_g, optimizer_d, batch):
        imgs, _ = batch
        valid, fake = torch.ones(len(imgs), 1), torch.zeros(len(imgs), 1)
        optimizer_g.zero_grad()
        gen_imgs = generator(drawn(len(imgs), LATENT))
        F.binary_cross_entropy(discriminator(gen_imgs), valid).backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        real_loss = F.binary_cross_entropy(discriminator(imgs), valid)
        fake_loss = F.binary_cross_entropy(discriminator(gen_imgs.detach()), fake)
        ((real_loss + fake_loss) / 2).backward()
        optimizer_d.step()

    return adversaries(train, Generator(), Discriminator())


@odd(notes="a penalty on gradients around real pictures is backpropagated by itself, beside the discriminator's loss")
def penalty_around_real_pictures() -> TrainLoop:
    def penalty(discriminator, real):
        alpha = torch.as_tensor(np.random.random(size=real.shape), dtype=real.dtype)
        between = alpha * real + (1 - alpha) * (real + 0.5 * real.std() * torch.rand(real.size()))
        between.requires_grad_()
        scores = discriminator(between)
        (slopes,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
        return 10 * ((slopes.norm(2, dim=1) - 1) ** 2).mean()

    def train(generator, discriminator, optimizer_g, optimizer_d, batch):
        imgs, _ = batch
        valid, fake = torch.ones(len(imgs), 1), torch.zeros(len(imgs), 1)
        optimizer_g.zero_grad()
        gen_imgs = generator(drawn(len(imgs), LATENT))
        F.binary_cross_entropy(discriminator(gen_imgs), valid).backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        real_loss = F.binary_cross_entropy(discriminator(imgs), valid)
        fake_loss = F.binary_cross_entropy(discriminator(gen_imgs.detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        d_loss.backward()
        penalty(discriminator, imgs.data).backward()
        optimizer_d.step()

    return adversaries(train, Generator(), Discriminator())


@odd(notes="labels of generated pictures are drawn in the loop; those of real ones are used in the second step only")
def auxiliary_classifier() -> TrainLoop:
    class Conditional(Generator):
        def __init__(self):
            super().__init__()
            self.label_emb = nn.Embedding(CLASSES, LATENT)

        def forward(self, noise, labels):
            return super().forward(self.label_emb(labels) * noise)

    def train(generator, discriminator, optimizer_g, optimizer_d, batch):
        imgs, labels = batch
        valid, fake = torch.ones(len(imgs), 1), torch.zeros(len(imgs), 1)
        optimizer_g.zero_grad()
        gen_labels = torch.as_tensor(np.random.randint(0, CLASSES, len(imgs)))
        gen_imgs = generator(drawn(len(imgs), LATENT), gen_labels)
        validity, pred_label = discriminator(gen_imgs)
        g_loss = 0.5 * (F.binary_cross_entropy(validity, valid) + F.cross_entropy(pred_label, gen_labels))
        g_loss.backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        real_pred, real_aux = discriminator(imgs)
        d_real_loss = (F.binary_cross_entropy(real_pred, valid) + F.cross_entropy(real_aux, labels)) / 2
        fake_pred, fake_aux = discriminator(gen_imgs.detach())
        d_fake_loss = (F.binary_cross_entropy(fake_pred, fake) + F.cross_entropy(fake_aux, gen_labels)) / 2
        ((d_real_loss + d_fake_loss) / 2).backward()
        optimizer_d.step()

    return adversaries(train, Conditional(), Discriminator(heads=(1, CLASSES)))


@odd(notes="labels are read by both nets; the generator gets others than those of the batch")
def conditional_adversaries() -> TrainLoop:
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.label_embedding = nn.Embedding(CLASSES, CLASSES)
            self.model = nn.Sequential(
                nn.Linear(64 + CLASSES, 32),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Linear(32, 32),
                nn.Dropout(0.4),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Linear(32, 1),
            )

        def forward(self, img, labels):
            return self.model(torch.cat((img.flatten(1), self.label_embedding(labels)), -1))

    class Conditional(Generator):
        def __init__(self):
            super().__init__(LATENT + CLASSES)
            self.label_emb = nn.Embedding(CLASSES, CLASSES)

        def forward(self, noise, labels):
            return super().forward(self.label_emb(labels), noise)

    def train(generator, discriminator, optimizer_g, optimizer_d, batch):
        imgs, labels = batch
        valid, fake = torch.ones(len(imgs), 1), torch.zeros(len(imgs), 1)
        optimizer_g.zero_grad()
        gen_labels = torch.as_tensor(np.random.randint(0, CLASSES, len(imgs)))
        gen_imgs = generator(drawn(len(imgs), LATENT), gen_labels)
        F.mse_loss(discriminator(gen_imgs, gen_labels), valid).backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        d_real_loss = F.mse_loss(discriminator(imgs, labels), valid)
        d_fake_loss = F.mse_loss(discriminator(gen_imgs.detach(), gen_labels), fake)
        ((d_real_loss + d_fake_loss) / 2).backward()
        optimizer_d.step()

    return adversaries(train, Conditional(), Critic())


@odd(notes="three optimizers, the third over both nets for a loss of codes that are drawn; labels are left out")
def codes_to_be_found_again() -> TrainLoop:
    def train(generator, discriminator, optimizer_g, optimizer_d, optimizer_info, batch):
        imgs, _ = batch
        rows = len(imgs)
        valid, fake = torch.ones(rows, 1), torch.zeros(rows, 1)
        optimizer_g.zero_grad()
        drawn_labels = torch.as_tensor(np.random.randint(0, CLASSES, rows))
        gen_imgs = generator(drawn(rows, LATENT), one_hot(drawn_labels), drawn(rows, CODES))
        validity, _, _ = discriminator(gen_imgs)
        F.mse_loss(validity, valid).backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        real_pred, _, _ = discriminator(imgs)
        fake_pred, _, _ = discriminator(gen_imgs.detach())
        ((F.mse_loss(real_pred, valid) + F.mse_loss(fake_pred, fake)) / 2).backward()
        optimizer_d.step()

        optimizer_info.zero_grad()
        sampled = torch.as_tensor(np.random.randint(0, CLASSES, rows))
        code = drawn(rows, CODES)
        _, pred_label, pred_code = discriminator(generator(drawn(rows, LATENT), one_hot(sampled), code))
        (F.cross_entropy(pred_label, sampled) + 0.1 * F.mse_loss(pred_code, code)).backward()
        optimizer_info.step()

    return adversaries(
        train,
        Generator(LATENT + CLASSES + CODES),
        Discriminator(heads=(1, CLASSES, CODES), sigmoid=False),
        chained=True,
    )


@odd(notes="the discriminator is an autoencoder; a weight of its loss, at first zero, is adapted by hand")
def boundary_equilibrium() -> TrainLoop:
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU())
            self.fc = nn.Sequential(
                nn.Linear(128, 16),
                nn.BatchNorm1d(16, 0.8),
                nn.ReLU(inplace=True),
                nn.Linear(16, 128),
                nn.BatchNorm1d(128),
                nn.ReLU(inplace=True),
            )
            self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, 1, 1))

        def forward(self, img):
            return self.up(self.fc(self.down(img).flatten(1)).view(-1, 8, 4, 4))

    k = [0.0]

    def train(generator, discriminator, optimizer_g, optimizer_d, batch):
        imgs, _ = batch
        optimizer_g.zero_grad()
        gen_imgs = generator(drawn(len(imgs), LATENT))
        (discriminator(gen_imgs) - gen_imgs).abs().mean().backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        d_real, d_fake = discriminator(imgs), discriminator(gen_imgs.detach())
        d_loss_real = (d_real - imgs).abs().mean()
        d_loss_fake = (d_fake - gen_imgs.detach()).abs().mean()
        d_loss = d_loss_real - k[0] * d_loss_fake
        d_loss.backward()
        optimizer_d.step()
        k[0] = min(max(k[0] + 0.001 * (0.75 * d_loss_real - d_loss_fake).item(), 0), 1)

    return adversaries(train, Generator(), Coder())


@odd(notes="scores are backpropagated with a vector of signs; the generator steps every second time, on the same noise")
def signs_given_to_backward() -> TrainLoop:
    count = [0]

    def penalty(critic, real, fake):
        alpha = torch.as_tensor(np.random.random((len(real), 1, 1, 1)), dtype=real.dtype)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_()
        scores = critic(between)
        (slopes,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
        return ((slopes.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

    def train(generator, critic, optimizer_g, optimizer_d, batch):
        imgs, _ = batch
        minus, plus = -torch.ones(len(imgs), 1) / len(imgs), torch.ones(len(imgs), 1) / len(imgs)
        optimizer_d.zero_grad()
        z = drawn(len(imgs), LATENT)
        fake_imgs = generator(z).detach()
        critic(imgs).backward(minus)
        critic(fake_imgs).backward(plus)
        (10 * penalty(critic, imgs.data, fake_imgs.data)).backward()
        optimizer_d.step()
        count[0] += 1
        if count[0] % 2 == 0:
            optimizer_g.zero_grad()
            critic(generator(z)).backward(minus)
            optimizer_g.step()

    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1))
    return adversaries(train, Generator(), critic)
