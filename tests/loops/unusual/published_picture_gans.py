"""Adversarial training in the order of well-known public code: pictures are made of pictures."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import images
from tests.loops.unusual.published_gans import adversaries


class Translator(nn.Module):
    """A picture for a picture of the same size."""

    def __init__(self, channels=1):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(channels, 8, 4, 2, 1), nn.InstanceNorm2d(8), nn.LeakyReLU(0.2))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.InstanceNorm2d(8), nn.ReLU(inplace=True))
        self.final = nn.Sequential(nn.Conv2d(8 + channels, 1, 3, padding=1), nn.Tanh())

    def forward(self, x):
        return self.final(torch.cat((self.up(self.down(x)), x), 1))


class Patches(nn.Module):
    def __init__(self, channels=1):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(channels, 8, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 3, padding=1, bias=False),
        )

    def forward(self, *given):
        return self.model(torch.cat(given, 1))


@odd(notes="the discriminator scores patches of the output next to the input")
def picture_to_picture() -> TrainLoop:
    def draw():
        imgs, _ = images()
        return {"A": imgs, "B": 0.7 * imgs.flip(3).tanh()}

    def train(generator, discriminator, optimizer_g, optimizer_d, batch):
        real_a, real_b = batch["B"], batch["A"]
        valid, fake = torch.ones(len(real_a), 1, 2, 2), torch.zeros(len(real_a), 1, 2, 2)
        optimizer_g.zero_grad()
        fake_b = generator(real_a)
        loss_gan = F.mse_loss(discriminator(fake_b, real_a), valid)
        (loss_gan + 100 * F.l1_loss(fake_b, real_b)).backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        loss_real = F.mse_loss(discriminator(real_b, real_a), valid)
        loss_fake = F.mse_loss(discriminator(fake_b.detach(), real_a), fake)
        (0.5 * (loss_real + loss_fake)).backward()
        optimizer_d.step()

    return adversaries(train, Translator(), Patches(2), draw=draw)


@odd(notes="a random part of each picture is cut out by numpy's draws, and is what both nets are to know")
def parts_cut_out() -> TrainLoop:
    class Inpainter(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(
                nn.Conv2d(1, 8, 4, 2, 1),
                nn.LeakyReLU(0.2),
                nn.Conv2d(8, 16, 1),
                nn.BatchNorm2d(16, 0.8),
                nn.ReLU(),
                nn.Conv2d(16, 1, 3, 1, 1),
                nn.Tanh(),
            )

        def forward(self, x):
            return self.model(x)

    def cut(imgs):
        masked, parts = imgs.clone(), []
        for i, (y, x) in enumerate(np.random.randint(0, 4, (len(imgs), 2))):
            parts.append(masked[i : i + 1, :, y : y + 4, x : x + 4].clone())
            masked[i, :, y : y + 4, x : x + 4] = 1
        return masked, torch.cat(parts)

    def train(generator, discriminator, optimizer_g, optimizer_d, imgs):
        masked, parts = cut(imgs)
        valid, fake = torch.ones(len(imgs), 1, 1, 1), torch.zeros(len(imgs), 1, 1, 1)
        optimizer_g.zero_grad()
        gen_parts = generator(masked)
        g_adv = F.mse_loss(discriminator(gen_parts), valid)
        (0.001 * g_adv + 0.999 * F.l1_loss(gen_parts, parts)).backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        real_loss = F.mse_loss(discriminator(parts), valid)
        fake_loss = F.mse_loss(discriminator(gen_parts.detach()), fake)
        (0.5 * (real_loss + fake_loss)).backward()
        optimizer_d.step()

    return adversaries(train, Inpainter(), Patches(), draw=lambda: images()[0])


@odd(notes="a fixed net compares features, its weights are held by no optimizer, and its results are made constant")
def super_resolution() -> TrainLoop:
    class Upscaler(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(inplace=True))
            self.res = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
            self.up = nn.Sequential(nn.Conv2d(8, 32, 3, 1, 1), nn.PixelShuffle(2), nn.ReLU(inplace=True))
            self.conv3 = nn.Conv2d(8, 1, 3, 1, 1)

        def forward(self, x):
            out = self.conv1(x)
            return self.conv3(self.up(out + self.res(out))).tanh()

    features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    def draw():
        imgs, _ = images()
        return {"lr": F.avg_pool2d(imgs, 2), "hr": imgs}

    def train(generator, discriminator, optimizer_g, optimizer_d, batch):
        imgs_lr, imgs_hr = batch["lr"].clone(), batch["hr"].clone()
        valid, fake = torch.ones(len(imgs_lr), 1, 2, 2), torch.zeros(len(imgs_lr), 1, 2, 2)
        optimizer_g.zero_grad()
        gen_hr = generator(imgs_lr)
        loss_gan = F.mse_loss(discriminator(gen_hr), valid)
        loss_content = F.l1_loss(features(gen_hr), features(imgs_hr).detach())
        (loss_content + 1e-3 * loss_gan).backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        loss_real = F.mse_loss(discriminator(imgs_hr), valid)
        loss_fake = F.mse_loss(discriminator(gen_hr.detach()), fake)
        ((loss_real + loss_fake) / 2).backward()
        optimizer_d.step()

    return adversaries(train, Upscaler(), Patches(), draw=draw)
