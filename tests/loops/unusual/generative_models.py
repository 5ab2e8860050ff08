"""Generative models with one loss: quantised codes, flows, diffusion, mixtures."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def inputs():
    return points()[0]


class VectorQuantizer(nn.Module):
    """Codebook with straight-through gradients; trained by a loss, or by moving averages of what chose it."""

    def __init__(self, codes=8, width=4, ema=None):
        super().__init__()
        self.codebook = nn.Embedding(codes, width)
        self.ema = ema
        if ema is not None:
            self.codebook.weight.requires_grad_(False)
            self.register_buffer("count", torch.ones(codes))
            self.register_buffer("total", self.codebook.weight.detach().clone())

    @torch.no_grad()
    def follow(self, z, index):
        chosen = F.one_hot(index, len(self.count)).to(z.dtype)
        self.count.lerp_(chosen.sum(0), 1 - self.ema)
        self.total.lerp_(chosen.T @ z, 1 - self.ema)
        self.codebook.weight.copy_(self.total / self.count.clamp(min=1e-5)[:, None])

    def forward(self, z, beta=0.25):
        index = torch.cdist(z, self.codebook.weight).argmin(1)
        q = self.codebook(index)
        loss = beta * F.mse_loss(z, q.detach())
        if self.ema is None:
            loss = loss + F.mse_loss(q, z.detach())
        elif self.training:
            self.follow(z, index)
        return z + (q - z).detach(), loss


class VQVAE(nn.Module):
    def __init__(self, ema=None):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = relu_mlp(8, 16, 4), VectorQuantizer(ema=ema), relu_mlp(4, 16, 8)

    def forward(self, x):
        q, loss = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(q), x) + loss


def train_returned_loss(model, optimizer, batches):
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()


@odd(notes="argmin and detach on the path of the loss; codes that nobody chose have no gradient (VQ-VAE)")
def vqvae_codebook_loss() -> TrainLoop:
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=inputs(),
        batches=fresh(inputs),
        fit=lambda batches: train_returned_loss(model, optimizer, batches),
    )


@odd(notes="the codebook is a frozen parameter that moves inside the training forward, by averages (VQ-VAE with EMA)")
def vqvae_codebook_by_moving_average() -> TrainLoop:
    model = VQVAE(ema=0.9)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=inputs(),
        fit=lambda batches: train_returned_loss(model, optimizer, batches),
    )


class VAE(nn.Module):
    def __init__(self, width=8, latent=3):
        super().__init__()
        self.encoder, self.decoder = relu_mlp(width, 16, 2 * latent), relu_mlp(latent, 16, width)

    def forward(self, x, weight=1.0):
        mean, log_var = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        return (self.decoder(z) - x).square().sum(1).mean() + weight * kl


def train_vae(model, optimizer, batches, warmup=10):
    for step, x in enumerate(batches):
        optimizer.zero_grad()
        model(x, weight=min(1.0, step / warmup)).backward()
        optimizer.step()


@odd(
    notes="one term has weight 0 at first and grows, so the total rises while the model learns (VAE with KL annealing)"
)
def vae_kl_annealing() -> TrainLoop:
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=inputs(),
        fit=lambda batches: train_vae(model, optimizer, batches),
    )


class Denoiser(nn.Module):
    """Noise prediction with classifier-free guidance: the label is sometimes replaced by the null class."""

    def __init__(self, width=8, classes=4, steps=20):
        super().__init__()
        self.label, self.time = nn.Embedding(classes + 1, 6), nn.Embedding(steps, 6)
        self.net = mlp(width + 12, 24, width, activation=nn.SiLU)
        self.register_buffer("signal", torch.linspace(0.999, 0.05, steps))
        self.null = classes

    def forward(self, x, y):
        t = torch.randint(len(self.signal), (len(x),))
        y = torch.where(torch.rand(len(x)) < 0.15, torch.full_like(y, self.null), y)
        noise, share = torch.randn_like(x), self.signal[t, None]
        mixed = share.sqrt() * x + (1 - share).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([mixed, self.label(y), self.time(t)], 1)), noise)


def train_diffusion(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()


@odd(notes="time steps, noise and label dropout are drawn anew: the loss of a fixed batch jumps about (DDPM)")
def diffusion_with_label_dropout() -> TrainLoop:
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_diffusion(model, optimizer, batches),
    )


class Coupling(nn.Module):
    def __init__(self, width, flip):
        super().__init__()
        self.net, self.flip = mlp(width // 2, 12, width, activation=nn.Tanh), flip
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, 1)[:: -1 if self.flip else 1]
        scale, shift = self.net(a).chunk(2, 1)
        b = b * scale.tanh().exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], 1), scale.tanh().sum(1)


class RealNVP(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.ModuleList([Coupling(width, flip) for flip in (False, True)])

    def log_prob(self, x):
        log_det = 0.0
        for layer in self.layers:
            x, contribution = layer(x)
            log_det = log_det + contribution
        return log_det - 0.5 * (x.square() + math.log(2 * math.pi)).sum(1)


def train_flow(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        (-model.log_prob(0.05 * x).mean()).backward()
        optimizer.step()


@odd(
    notes="a density's loss may be any number and goes below 0; the model has no forward(); "
    "all couplings start as the identity"
)
def normalizing_flow() -> TrainLoop:
    model = RealNVP()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=inputs(),
        fit=lambda batches: train_flow(model, optimizer, batches),
    )


def sliced_score_matching(score, x):
    x = x.clone().requires_grad_(True)
    direction = torch.randn_like(x)
    s = score(x)
    (slope,) = torch.autograd.grad((s * direction).sum(), x, create_graph=True)
    return ((slope * direction).sum(1) + 0.5 * (s * direction).sum(1).square()).mean()


def train_score(score, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        sliced_score_matching(score, x).backward()
        optimizer.step()


@odd(notes="the loss is a second derivative and falls without bound towards the negative (sliced score matching)")
def sliced_score_matching_network() -> TrainLoop:
    score = mlp(8, 16, 8, activation=nn.Softplus)
    optimizer = torch.optim.Adam(score.parameters(), lr=2e-3)
    return TrainLoop(
        model=score,
        optimizer=optimizer,
        batch=inputs(),
        batches=fresh(inputs),
        fit=lambda batches: train_score(score, optimizer, batches),
    )


class MixtureDensity(nn.Module):
    def __init__(self, components=3):
        super().__init__()
        self.body, self.heads = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3 * components)

    def forward(self, x):
        weight, mean, log_std = self.heads(self.body(x)).chunk(3, 1)
        return torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=weight),
            torch.distributions.Normal(mean, log_std.exp() + 1e-2),
        )


def train_mixture(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        (-model(x).log_prob(y.squeeze(1)).mean()).backward()
        optimizer.step()


@odd(notes="forward returns a distribution and no tensor (mixture density network)")
def mixture_density_network() -> TrainLoop:
    model = MixtureDensity()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        fit=lambda batches: train_mixture(model, optimizer, batches),
    )


class DeepKernel(nn.Module):
    """Gaussian process over learned features, trained on its marginal likelihood."""

    def __init__(self):
        super().__init__()
        self.features = mlp(8, 12, 2, activation=nn.Tanh)
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-2.0))

    def forward(self, x, y):
        z = self.features(x)
        distance = (z[:, None] - z[None]).square().sum(-1)
        kernel = self.log_scale.exp() * torch.exp(-0.5 * distance) + self.log_noise.exp() * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y, factor)
        return (0.5 * (y * solved).sum() + factor.diagonal().log().sum()) / len(x)


def train_gp(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()


@odd(
    notes="all rows make one loss through a matrix factorisation; "
    "the features' last bias cancels in distances (deep kernel)"
)
def deep_kernel_gaussian_process() -> TrainLoop:
    model = DeepKernel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        batches=fresh(curves),
        fit=lambda batches: train_gp(model, optimizer, batches),
    )
