"""Diffusion, variational and adversarial losses, distillation."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def points(n=48, dim=6, seed=60):
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(n, generator=g)
    base = torch.stack([angle.cos(), angle.sin()], 1) @ torch.randn(2, dim, generator=g)
    return TensorDataset(base + 0.05 * torch.randn(n, dim, generator=g))


def loader(data, size=12):
    return DataLoader(data, batch_size=size, shuffle=True)


class Denoiser(nn.Module):
    def __init__(self, dim=6, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.inp, self.out = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t.float().view(-1, 1) / 100)
        return self.out(F.silu(h))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, steps=100, predict_epsilon=True):
        super().__init__()
        self.model, self.steps, self.predict_epsilon = model, steps, predict_epsilon
        alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.06, steps), 0)
        self.register_buffer("alphas_cumprod", alphas_cumprod)

    def q_sample(self, x_start, t, noise):
        a = self.alphas_cumprod[t].view(-1, 1)
        return a.sqrt() * x_start + (1 - a).sqrt() * noise


@fault(
    "diffusion",
    "with predict_epsilon=False the model is compared with x_noisy, its own input, and not with x_start",
    thread="irom-princeton/dppo#14",
    check="loss_formula",
)
def diffusion_policy():
    class DiffusionModel(GaussianDiffusion):
        def p_losses(self, x_start, t):
            noise = torch.randn_like(x_start)
            x_noisy = self.q_sample(x_start=x_start, t=t, noise=noise)
            x_recon = self.model(x_noisy, t)
            if self.predict_epsilon:
                return F.mse_loss(x_recon, noise, reduction="mean")
            return F.mse_loss(x_recon, x_noisy, reduction="mean")

        def loss(self, x):
            t = torch.randint(0, self.steps, (len(x),))
            return self.p_losses(x, t)

    diffusion = DiffusionModel(Denoiser(), predict_epsilon=False)
    ema = copy.deepcopy(diffusion).requires_grad_(False)
    optimizer = torch.optim.AdamW(diffusion.parameters(), lr=1e-3)

    def train(batches):
        for (x,) in batches:
            loss = diffusion.loss(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for p, q in zip(diffusion.parameters(), ema.parameters(), strict=True):
                q.lerp_(p.detach(), 0.005)

    return TrainLoop(model={"model": diffusion, "ema": ema}, optimizer=optimizer, batches=loader(points()), fit=train)


@fault(
    "diffusion",
    "the signal-to-noise ratio is clamped from below (min=) where min-SNR clamps it from above",
    thread="lucidrains/recurrent-interface-network-pytorch#11",
    check="loss_formula",
)
def min_snr():
    class Trainer:
        def __init__(self, min_snr_gamma=5.0, lr=1e-3):
            self.diffusion = GaussianDiffusion(Denoiser())
            self.opt = torch.optim.Adam(self.diffusion.parameters(), lr=lr, betas=(0.9, 0.99))
            self.min_snr_gamma = min_snr_gamma

        def train_one_batch(self, img):
            times = torch.randint(0, self.diffusion.steps, (img.shape[0],))
            noise = torch.randn_like(img)
            pred = self.diffusion.model(self.diffusion.q_sample(img, times, noise), times)
            loss = F.mse_loss(pred, noise, reduction="none").mean(1)
            a = self.diffusion.alphas_cumprod[times]
            snr = a / (1 - a)
            maybe_clipped_snr = snr.clone()
            maybe_clipped_snr.clamp_(min=self.min_snr_gamma)
            loss_weight = maybe_clipped_snr / snr
            loss = (loss * loss_weight).mean()
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.diffusion.parameters(), 1.0)
            self.opt.step()

    trainer = Trainer()
    return TrainLoop(
        model=trainer.diffusion,
        optimizer=trainer.opt,
        batches=loader(points(seed=61)),
        fit=lambda batches: [trainer.train_one_batch(x) for (x,) in batches],
    )


@fault(
    "diffusion",
    "weights of shape (N, 1) multiply errors of shape (N,): every row's weight meets every row's error",
    thread="bayesflow-org/bayesflow#787",
    check="loss_formula",
)
def weighted_velocity():
    net = Denoiser()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def compute_metrics(x):
        log_snr = torch.empty(len(x), 1).uniform_(-6, 6)
        alpha, sigma = torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()
        eps = torch.randn_like(x)
        target = alpha * eps - sigma * x
        pred = net(alpha * x + sigma * eps, log_snr * 10)
        weights = torch.sigmoid(-log_snr + 2) * 2
        return (weights * ((pred - target) ** 2).mean(dim=-1)).mean()

    def train(batches):
        for (x,) in batches:
            optimizer.zero_grad()
            compute_metrics(x).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batches=loader(points(seed=62)), fit=train)


class VAE(nn.Module):
    def __init__(self, dim=6, latent=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, dim))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


@fault(
    "diffusion",
    "logvar is squared and its logarithm taken as if it were sigma, while the sampling takes exp(logvar / 2)",
    thread="deepchem/deepchem#4888",
    check="loss_formula",
)
def vae_elbo():
    class VAEElbo:
        def __call__(self, recon, x, mu, logvar, kl_scale=0.5):
            reconstruction = ((recon - x) ** 2).sum(-1)
            logvar_square = logvar.square()
            kl = 0.5 * (mu.square() + logvar_square - torch.log(1e-20 + logvar_square) - 1).mean(-1)
            return (reconstruction + kl_scale * kl).mean()

    model, criterion = VAE(), VAEElbo()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        model.train()
        for (x,) in batches:
            optimizer.zero_grad()
            recon, mu, logvar = model(x)
            criterion(recon, x, mu, logvar).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(points(seed=63)), fit=train)


@fault(
    "diffusion",
    "torch.sum has no dim, so each position's mask multiplies the divergence of the whole batch",
    thread="EDAPINENUT/GNTPP#4",
    check="loss_formula",
)
def sequence_vae():
    class SeqVAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.vae = VAE(dim=4, latent=2)

        def compute_loss(self, x, mask):
            recon, mean, log_var = self.vae(x)
            rec_loss = (recon - x).pow(2).sum(-1) * mask
            kl_loss = (-0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())) * mask
            return (rec_loss + 0.01 * kl_loss).sum() / mask.sum()

    def make(n, rows=8, steps=7):
        g = torch.Generator().manual_seed(64)
        out = []
        for _ in range(n):
            length = torch.randint(2, steps, (rows,), generator=g)
            mask = (torch.arange(steps)[None] < length[:, None]).float()
            out.append((torch.randn(rows, steps, 4, generator=g).cumsum(1) * 0.5 * mask[..., None], mask))
        return out

    model = SeqVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for x, mask in batches:
            loss = model.compute_loss(x, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=make, fit=train)


def gan_pair(dim=6, latent=4):
    g = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, dim))
    d = nn.Sequential(nn.Linear(dim, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    return g, d


@fault(
    "diffusion",
    "autograd.grad is called without create_graph, so the gradient penalty is a constant for the critic's weights",
    thread="ooples/AiDotNet#1844",
    check="every_term_trains",
)
def wgan_gp():
    generator, critic = gan_pair()
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def compute_gradient_penalty(real, fake):
        alpha = torch.rand(real.size(0), 1)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = critic(interpolates)
        gradients = torch.autograd.grad(scores, interpolates, grad_outputs=torch.ones_like(scores))[0]
        gradients = gradients.view(gradients.size(0), -1)
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    def train(batches, n_critic=2, lambda_gp=10):
        for i, (real,) in enumerate(batches):
            fake = generator(torch.randn(real.size(0), 4)).detach()
            d_loss = -critic(real).mean() + critic(fake).mean() + lambda_gp * compute_gradient_penalty(real, fake)
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            if i % n_critic == 0:
                g_loss = -critic(generator(torch.randn(real.size(0), 4))).mean()
                opt_g.zero_grad()
                g_loss.backward()
                opt_g.step()

    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=[opt_g, opt_d],
        batches=loader(points(seed=65)),
        fit=train,
    )


@fault(
    "diffusion",
    "the gradient is normed over dim=1 of (N, C, H, W), its channels, so the penalty acts on single pixels",
    thread="Zeleni9/pytorch-wgan#40",
    check="loss_formula",
)
def wgan_images():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 2 * 5 * 5)
            self.conv = nn.Conv2d(2, 1, 3, padding=1)

        def forward(self, z):
            return self.conv(self.fc(z).view(-1, 2, 5, 5).relu()).tanh()

    g_net = Generator()
    d_net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(36, 1))
    g_optimizer = torch.optim.Adam(g_net.parameters(), lr=1e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(d_net.parameters(), lr=1e-4, betas=(0.5, 0.999))

    def calculate_gradient_penalty(real_images, fake_images):
        eta = torch.rand(len(real_images), 1, 1, 1).expand_as(real_images)
        interpolated = (eta * real_images + (1 - eta) * fake_images).detach().requires_grad_(True)
        prob = d_net(interpolated)
        gradients = torch.autograd.grad(
            prob, interpolated, torch.ones_like(prob), create_graph=True, retain_graph=True
        )[0]
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * 10.0

    def train(batches):
        for (images,) in batches:
            fake = g_net(torch.randn(len(images), 6))
            d_loss = d_net(fake.detach()).mean() - d_net(images).mean()
            d_loss = d_loss + calculate_gradient_penalty(images, fake.detach())
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            (-d_net(g_net(torch.randn(len(images), 6))).mean()).backward()
            g_optimizer.step()

    g = torch.Generator().manual_seed(66)
    rows = torch.linspace(-1, 1, 5).view(1, 1, 5, 1) * torch.rand(40, 1, 1, 5, generator=g)
    return TrainLoop(
        model={"generator": g_net, "discriminator": d_net},
        optimizer=[g_optimizer, d_optimizer],
        batches=loader(TensorDataset(rows), 8),
        fit=train,
    )


@fault(
    "diffusion",
    "kl_div gets the student's softmax where it takes log-probabilities",
    thread="microsoft/ProDA#43",
    check="loss_contract",
)
def self_distillation():
    teacher = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5)).requires_grad_(False)
    student = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(67)
    x = torch.randn(48, 8, generator=g)
    y = (x[:, :5] + 0.2 * torch.randn(48, 5, generator=g)).argmax(1)

    def train(batches, distillation=1.0):
        for xb, yb in batches:
            out = student(xb)
            loss = F.cross_entropy(out, yb)
            prob = F.softmax(out, dim=1)
            with torch.no_grad():
                target = F.softmax(teacher(xb), dim=1)
            loss_kd = F.kl_div(prob, target, reduction="none").sum(1).mean()
            loss = loss + distillation * loss_kd
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batches=loader(TensorDataset(x, y)),
        fit=train,
        frozen=("teacher.",),
    )


@fault(
    "diffusion",
    "the codebook's loss is taken of the straight-through output, where the codebook stands inside detach()",
    thread="showlab/Olaf-World#8",
    check="gradient_reaches_every_param",
)
def vq_autoencoder():
    class VectorQuantizer(nn.Module):
        def __init__(self, k=16, dim=4):
            super().__init__()
            self.codebook = nn.Embedding(k, dim)
            nn.init.uniform_(self.codebook.weight, -0.5, 0.5)

        def forward(self, x):
            indices = torch.cdist(x, self.codebook.weight).argmin(-1)
            z = self.codebook(indices)
            z_q = x + (z - x).detach()
            return z_q, z, indices

    class VQAE(nn.Module):
        def __init__(self, beta=0.25):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4))
            self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 6))
            self.vq, self.beta = VectorQuantizer(), beta

        def forward(self, x):
            z_e = self.encoder(x)
            z_q, _, _ = self.vq(z_e)
            recon = F.mse_loss(self.decoder(z_q), x)
            codebook_loss = F.mse_loss(z_q, z_e.detach())
            commit_loss = F.mse_loss(z_e, z_q.detach())
            return recon + codebook_loss + self.beta * commit_loss

    model = VQAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(batches):
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(points(seed=68)), fit=train)
