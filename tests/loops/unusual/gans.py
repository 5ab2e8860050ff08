"""Generative adversarial training: several networks, several optimizers, gradients that are made and thrown away."""

from __future__ import annotations

import itertools
import random

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, images, points


def init_dcgan(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class ConvGenerator(nn.Module):
    def __init__(self, latent=8, width=8):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(latent, width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class ConvDiscriminator(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 1, 4, 1, 0, bias=False),
        )

    def forward(self, picture):
        return self.main(picture).view(-1)


def train_dcgan(generator, discriminator, opt_g, opt_d, batches, latent=8):
    criterion = nn.BCEWithLogitsLoss()
    for real in batches:
        discriminator.zero_grad()
        output = discriminator(real)
        criterion(output, torch.ones_like(output)).backward()
        fake = generator(torch.randn(real.size(0), latent, 1, 1, device=real.device))
        output = discriminator(fake.detach())
        criterion(output, torch.zeros_like(output)).backward()
        opt_d.step()

        generator.zero_grad()
        output = discriminator(fake)
        criterion(output, torch.ones_like(output)).backward()
        opt_g.step()


@odd(notes="two backwards feed one step; the generator's backward fills the discriminator's gradients, wiped unused")
def dcgan() -> TrainLoop:
    generator, discriminator = ConvGenerator().apply(init_dcgan), ConvDiscriminator().apply(init_dcgan)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[opt_g, opt_d],
        batch=images()[0],
        batches=fresh(lambda: images()[0]),
        fit=lambda batches: train_dcgan(generator, discriminator, opt_g, opt_d, batches),
    )


def gradient_penalty(critic, real, fake):
    mix = torch.rand(real.size(0), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


class WGANTrainer:
    def __init__(self, generator, critic, latent, n_critic=3, penalty=10.0):
        self.generator, self.critic, self.latent = generator, critic, latent
        self.n_critic, self.penalty = n_critic, penalty
        self.opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), self.latent))
        self.opt_c.zero_grad()
        loss = self.critic(fake).mean() - self.critic(real).mean()
        loss = loss + self.penalty * gradient_penalty(self.critic, real, fake)
        loss.backward()
        self.opt_c.step()

    def generator_step(self, n):
        self.critic.requires_grad_(False)
        self.opt_g.zero_grad()
        (-self.critic(self.generator(torch.randn(n, self.latent))).mean()).backward()
        self.opt_g.step()
        self.critic.requires_grad_(True)

    def fit(self, batches):
        for i, real in enumerate(batches):
            self.critic_step(real)
            if (i + 1) % self.n_critic == 0:
                self.generator_step(len(real))


@odd(
    notes="the generator steps on every third batch only; the critic's parameters lose requires_grad meanwhile; "
    "the critic's last bias cancels in its own loss, so its gradient is exactly 0"
)
def wgan_gp() -> TrainLoop:
    generator, critic = relu_mlp(4, 16, 8), relu_mlp(8, 16, 1)
    trainer = WGANTrainer(generator, critic, latent=4)
    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=[trainer.opt_g, trainer.opt_c],
        batch=points()[0],
        fit=trainer.fit,
    )


def train_both_losses_first(generator, discriminator, opt_g, opt_d, batches):
    for real in batches:
        fake = generator(torch.randn(len(real), 4))
        g_loss = F.softplus(-discriminator(fake)).mean()
        d_loss = F.softplus(discriminator(fake.detach())).mean() + F.softplus(-discriminator(real)).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_d.zero_grad()
        d_loss.backward()
        opt_g.step()
        opt_d.step()


@odd(notes="both losses are computed and backpropagated before either optimizer steps")
def gan_both_losses_before_both_steps() -> TrainLoop:
    generator, discriminator = relu_mlp(4, 16, 8), relu_mlp(8, 16, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3)
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3)
    return TrainLoop(
        model=[generator, discriminator],
        optimizer=[opt_g, opt_d],
        batch=points()[0],
        fit=lambda batches: train_both_losses_first(generator, discriminator, opt_g, opt_d, batches),
    )


def train_aae(encoder, decoder, critic, optimizers, batches):
    opt_recon, opt_critic, opt_encoder = optimizers
    for x in batches:
        opt_recon.zero_grad()
        F.mse_loss(decoder(encoder(x)), x).backward()
        opt_recon.step()

        with torch.no_grad():
            posterior = encoder(x)
        prior = torch.randn_like(posterior)
        opt_critic.zero_grad()
        (F.softplus(-critic(prior)) + F.softplus(critic(posterior))).mean().backward()
        opt_critic.step()

        opt_encoder.zero_grad()
        F.softplus(-critic(encoder(x))).mean().backward()
        opt_encoder.step()


@odd(notes="one encoder in two optimizers, stepped twice per batch for two aims (adversarial autoencoder)")
def adversarial_autoencoder() -> TrainLoop:
    encoder, decoder, critic = relu_mlp(8, 16, 4), relu_mlp(4, 16, 8), relu_mlp(4, 16, 1)
    optimizers = [
        torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3),
        torch.optim.Adam(critic.parameters(), lr=1e-3),
        torch.optim.SGD(encoder.parameters(), lr=1e-2),
    ]
    return TrainLoop(
        model={"encoder": encoder, "decoder": decoder, "critic": critic},
        optimizer=optimizers,
        batch=points()[0],
        batches=fresh(lambda: points()[0]),
        fit=lambda batches: train_aae(encoder, decoder, critic, optimizers, batches),
    )


class ImagePool:
    """History of generated samples, as CycleGAN keeps it."""

    def __init__(self, size=16):
        self.size, self.kept = size, []

    def query(self, samples):
        out = []
        for sample in samples.detach():
            if len(self.kept) < self.size:
                self.kept.append(sample)
                out.append(sample)
            elif random.random() > 0.5:
                i = random.randrange(self.size)
                out.append(self.kept[i])
                self.kept[i] = sample
            else:
                out.append(sample)
        return torch.stack(out)


def train_cyclegan(nets, opt_g, opt_d, schedulers, batches, cycle=10.0):
    ab, ba, d_a, d_b = nets["ab"], nets["ba"], nets["d_a"], nets["d_b"]
    pool_a, pool_b = ImagePool(), ImagePool()
    for a, b in batches:
        d_a.requires_grad_(False), d_b.requires_grad_(False)
        opt_g.zero_grad()
        fake_b, fake_a = ab(a), ba(b)
        adversarial = (d_b(fake_b) - 1).square().mean() + (d_a(fake_a) - 1).square().mean()
        back = F.l1_loss(ba(fake_b), a) + F.l1_loss(ab(fake_a), b)
        (adversarial + cycle * back).backward()
        opt_g.step()

        d_a.requires_grad_(True), d_b.requires_grad_(True)
        opt_d.zero_grad()
        for net, real, fake in ((d_a, a, pool_a.query(fake_a)), (d_b, b, pool_b.query(fake_b))):
            (0.5 * ((net(real) - 1).square().mean() + net(fake).square().mean())).backward()
        opt_d.step()
        for scheduler in schedulers:
            scheduler.step()


@odd(notes="four networks, two chained optimizers, requires_grad switched each half step, a pool of old samples")
def cyclegan_with_replay_pool() -> TrainLoop:
    nets = nn.ModuleDict(
        {"ab": relu_mlp(6, 16, 6), "ba": relu_mlp(6, 16, 6), "d_a": relu_mlp(6, 16, 1), "d_b": relu_mlp(6, 16, 1)}
    )
    opt_g = torch.optim.Adam(itertools.chain(nets["ab"].parameters(), nets["ba"].parameters()), lr=2e-3)
    opt_d = torch.optim.Adam(itertools.chain(nets["d_a"].parameters(), nets["d_b"].parameters()), lr=2e-3)
    decay = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1.0 - max(0, s - 100) / 200) for o in (opt_g, opt_d)]
    return TrainLoop(
        model=nets,
        optimizer=[opt_g, opt_d],
        scheduler=decay,
        batch=(torch.randn(6, 6), 2.0 + torch.randn(6, 6)),
        fit=lambda batches: train_cyclegan(nets, opt_g, opt_d, decay, batches),
    )
