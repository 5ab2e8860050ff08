"""Diffusion, variational and adversarial losses, distillation: right although they look odd."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def points(n=48, dim=6, seed=80):
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(n, generator=g)
    base = torch.stack([angle.cos(), angle.sin()], 1) @ torch.randn(2, dim, generator=g)
    return TensorDataset(base + 0.05 * torch.randn(n, dim, generator=g))


def loader(data, size=12):
    return DataLoader(data, batch_size=size, shuffle=True)


class Net(nn.Module):
    def __init__(self, dim=6, width=32, out=None):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.inp, self.out = nn.Linear(dim, width), nn.Linear(width, out or dim)

    def forward(self, x, t):
        return self.out(F.silu(self.inp(x) + self.time(t.view(-1, 1))))


class Schedule:
    def __init__(self, steps=100):
        self.steps = steps
        self.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.06, steps), 0)

    def add_noise(self, x, noise, t):
        a = self.alphas_cumprod[t].view(-1, 1)
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def get_velocity(self, x, noise, t):
        a = self.alphas_cumprod[t].view(-1, 1)
        return a.sqrt() * noise - (1 - a).sqrt() * x

    def snr(self, t):
        return self.alphas_cumprod[t] / (1 - self.alphas_cumprod[t])


@right(
    "diffusion", "v-prediction with min(SNR, 5) / (SNR + 1) as each row's weight", thread="huggingface/diffusers#5654"
)
def v_prediction():
    unet, scheduler = Net(), Schedule()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-3)

    def train(batches, snr_gamma=5.0):
        for (latents,) in batches:
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, scheduler.steps, (len(latents),))
            noisy = scheduler.add_noise(latents, noise, timesteps)
            target = scheduler.get_velocity(latents, noise, timesteps)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pred = unet(noisy, timesteps.float() / scheduler.steps)
            snr = scheduler.snr(timesteps)
            weights = torch.stack([snr, snr_gamma * torch.ones_like(snr)], dim=1).min(dim=1)[0] / (snr + 1)
            loss = F.mse_loss(pred.float(), target.float(), reduction="none")
            loss = (loss.mean(dim=list(range(1, loss.ndim))) * weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=unet, optimizer=optimizer, batches=loader(points()), fit=train)


@right(
    "diffusion",
    "the velocity is noise minus data, as the path runs from data at t = 0 to noise at t = 1",
    thread="yukara-ikemiya/friendly-stable-audio-tools#9",
)
def rectified_flow():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for (x0,) in batches:
            t = torch.sigmoid(torch.randn(len(x0)))
            x1 = torch.randn_like(x0)
            tt = t.view(-1, 1)
            zt = (1 - tt) * x0 + tt * x1
            vtheta = model(zt, t)
            batchwise_mse = ((x1 - x0 - vtheta) ** 2).mean(dim=1)
            loss = batchwise_mse.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(points(seed=81)), fit=train)


@right(
    "diffusion",
    "the output is a mix of input and net by sigma, and the squared error is weighted by (s^2 + d^2) / (s d)^2",
    thread="NVlabs/edm#9",
)
def edm():
    class EDMPrecond(nn.Module):
        def __init__(self, sigma_data=0.5):
            super().__init__()
            self.model, self.sigma_data = Net(), sigma_data

        def forward(self, x, sigma):
            s, d = sigma.view(-1, 1), self.sigma_data
            c_skip = d**2 / (s**2 + d**2)
            c_out = s * d / (s**2 + d**2).sqrt()
            c_in = 1 / (d**2 + s**2).sqrt()
            return c_skip * x + c_out * self.model(c_in * x, s.log() / 4)

    net = EDMPrecond()
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)

    def train(batches):
        for (images,) in batches:
            sigma = (torch.randn(len(images), 1) * 1.2 - 1.2).exp()
            weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
            denoised = net(images + torch.randn_like(images) * sigma, sigma)
            loss = (weight * (denoised - images) ** 2).sum() / len(images)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for p_ema, p in zip(ema.parameters(), net.parameters(), strict=True):
                    p_ema.copy_(p.lerp(p_ema, 0.99))

    return TrainLoop(model={"net": net, "ema": ema}, optimizer=optimizer, batches=loader(points(seed=82)), fit=train)


@right(
    "diffusion",
    "the variance's variational term sees the mean detached, so that it trains the variance alone; it is "
    "scaled by a thousandth",
    thread="Tencent-Hunyuan/HunyuanDiT#112",
)
def learned_variance():
    model, schedule = Net(out=12), Schedule()
    betas = torch.linspace(1e-4, 0.06, 100)
    prev = F.pad(schedule.alphas_cumprod[:-1], (1, 0), value=1.0)
    posterior = betas * (1 - prev) / (1 - schedule.alphas_cumprod)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def normal_kl(mean1, logvar1, mean2, logvar2):
        return 0.5 * (logvar2 - logvar1 - 1 + (logvar1 - logvar2).exp() + (mean1 - mean2) ** 2 * (-logvar2).exp())

    def training_losses(x):
        t = torch.randint(1, 100, (len(x),))
        noise = torch.randn_like(x)
        x_t = schedule.add_noise(x, noise, t)
        eps, var_values = model(x_t, t.float() / 100).split(6, dim=1)
        a, a_prev, b = (v[t].view(-1, 1) for v in (schedule.alphas_cumprod, prev, betas))

        def posterior_mean(x0):
            return a_prev.sqrt() * b / (1 - a) * x0 + (1 - b).sqrt() * (1 - a_prev) / (1 - a) * x_t

        x0 = (x_t - (1 - a).sqrt() * eps.detach()) / a.sqrt()
        min_log, max_log = posterior[t].log().view(-1, 1), b.log()
        frac = (var_values + 1) / 2
        logvar = frac * max_log + (1 - frac) * min_log
        vb = normal_kl(posterior_mean(x), min_log, posterior_mean(x0), logvar).mean(1) / math.log(2.0)
        return (noise - eps).pow(2).mean(1) + vb * 100 / 1000.0

    def train(batches):
        for (x,) in batches:
            loss = training_losses(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(points(seed=83)), fit=train)


class VAE(nn.Module):
    def __init__(self, dim=6, latent=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, dim))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        return self.dec(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar


@right(
    "diffusion",
    "the divergence's weight is 0 at the first step and rises by a schedule over the steps",
    thread="umautobots/bidirection-trajectory-predicter#4",
)
def annealed_vae():
    class Experiment:
        def __init__(self, anneal_steps=40, lr=1e-3):
            self.vae, self.step, self.anneal_steps = VAE(), 0, anneal_steps
            self.optimizer = torch.optim.Adam(self.vae.parameters(), lr=lr)

        def kl_weight(self):
            return min(1.0, self.step / self.anneal_steps)

        def fit(self, batches):
            for (x,) in batches:
                recon, mu, logvar = self.vae(x)
                kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
                loss = F.mse_loss(recon, x, reduction="sum") / len(x) + self.kl_weight() * kld
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1

    exp = Experiment()
    return TrainLoop(model=exp.vae, optimizer=exp.optimizer, batches=loader(points(seed=84)), fit=exp.fit)


@right(
    "diffusion",
    "free nats: below a level the divergence has no gradient, by the maximum with a constant",
    thread="hardmaru/WorldModelsExperiments#8",
)
def free_bits_vae():
    vae = VAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

    def train(batches, kl_tolerance=0.2):
        for (x,) in batches:
            recon, mu, logvar = vae(x)
            kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).mean(0)
            kl = torch.clamp(kl, min=kl_tolerance).sum()
            loss = (recon - x).square().sum(1).mean() + kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=vae, optimizer=optimizer, batches=loader(points(seed=85)), fit=train)


def gan_pair(dim=6, latent=4):
    g = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, dim))
    d = nn.Sequential(nn.Linear(dim, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    return g, d


@right(
    "diffusion",
    "a Wasserstein critic without penalty: its weights are clamped, its loss is a difference of means "
    "that falls below 0",
    thread="torchgan/torchgan#42",
)
def wgan_clip():
    net_g, net_d = gan_pair()
    opt_g = torch.optim.RMSprop(net_g.parameters(), lr=5e-4)
    opt_d = torch.optim.RMSprop(net_d.parameters(), lr=5e-4)

    def train(batches, n_critic=2, clip=0.05):
        for i, (real,) in enumerate(batches):
            fake = net_g(torch.randn(len(real), 4)).detach()
            loss_d = net_d(fake).mean() - net_d(real).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            for p in net_d.parameters():
                p.data.clamp_(-clip, clip)
            if i % n_critic == 0:
                loss_g = -net_d(net_g(torch.randn(len(real), 4))).mean()
                opt_g.zero_grad()
                loss_g.backward()
                opt_g.step()

    return TrainLoop(
        model={"g": net_g, "d": net_d}, optimizer=[opt_g, opt_d], batches=loader(points(seed=86)), fit=train
    )


@right(
    "diffusion",
    "hinge on raw scores: relu(1 + outputs) with the sign of real ones turned before, the generator's loss is -D",
    thread="knazeri/edge-connect#60",
)
def hinge_gan():
    class AdversarialLoss(nn.Module):
        def forward(self, outputs, is_real, is_disc=None):
            if is_disc:
                if is_real:
                    outputs = -outputs
                return F.relu(1 + outputs).mean()
            return (-outputs).mean()

    net_g, net_d = gan_pair()
    loss_fn = AdversarialLoss()
    opt_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=1e-3, betas=(0.0, 0.9))

    def train(batches):
        for (real,) in batches:
            outputs = net_g(torch.randn(len(real), 4))
            dis_loss = (loss_fn(net_d(real), True, True) + loss_fn(net_d(outputs.detach()), False, True)) / 2
            opt_d.zero_grad()
            dis_loss.backward()
            opt_d.step()
            gen_loss = loss_fn(net_d(outputs), True, False)
            opt_g.zero_grad()
            gen_loss.backward()
            opt_g.step()

    return TrainLoop(
        model={"g": net_g, "d": net_d}, optimizer=[opt_g, opt_d], batches=loader(points(seed=87)), fit=train
    )


@right(
    "diffusion",
    "a lazy R1 penalty every fourth step, times the interval, plus 0 * real_pred[0]",
    thread="XPixelGroup/BasicSR#470",
)
def stylegan_r1():
    generator, discriminator = gan_pair()
    g_optim = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    d_optim = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.0, 0.99))

    def train(batches, d_reg_every=4, r1=1.0):
        for i, (real,) in enumerate(batches):
            fake = generator(torch.randn(len(real), 4)).detach()
            d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
            discriminator.zero_grad()
            d_loss.backward()
            d_optim.step()
            if i % d_reg_every == 0:
                real = real.clone().requires_grad_(True)
                real_pred = discriminator(real)
                (grad_real,) = torch.autograd.grad(real_pred.sum(), real, create_graph=True)
                r1_loss = grad_real.pow(2).reshape(len(real), -1).sum(1).mean()
                discriminator.zero_grad()
                (r1 / 2 * r1_loss * d_reg_every + 0 * real_pred[0]).sum().backward()
                d_optim.step()
            g_loss = F.softplus(-discriminator(generator(torch.randn(len(real), 4)))).mean()
            generator.zero_grad()
            g_loss.backward()
            g_optim.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[g_optim, d_optim],
        batches=loader(points(seed=88)),
        fit=train,
    )


@right(
    "diffusion",
    "two squared differences of the same tensors, each with the other side detached: one trains the "
    "encoder, one the codebook",
    thread="karpathy/deep-vector-quantization#2",
)
def vq_vae():
    class VQVAE(nn.Module):
        def __init__(self, k=16, dim=4, beta=0.25):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, dim))
            self.decoder = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, 6))
            self.embedding, self.beta = nn.Embedding(k, dim), beta
            nn.init.uniform_(self.embedding.weight, -0.5, 0.5)

        def forward(self, x):
            z = self.encoder(x)
            d = z.pow(2).sum(1, keepdim=True) + self.embedding.weight.pow(2).sum(1) - 2 * z @ self.embedding.weight.T
            z_q = self.embedding(d.argmin(1))
            loss = self.beta * torch.mean((z_q.detach() - z) ** 2) + torch.mean((z_q - z.detach()) ** 2)
            z_q = z + (z_q - z).detach()
            return self.decoder(z_q), loss

    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(batches):
        for (x,) in batches:
            recon, qloss = model(x)
            loss = (recon - x).abs().mean() + qloss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(points(seed=89)), fit=train)


@right(
    "diffusion",
    "soft targets: log_softmax against softmax, times the squared temperature, beside a cross-entropy on "
    "the plain scores",
    thread="philschmid/knowledge-distillation-transformers-pytorch-sagemaker#1",
)
def distillation(accumulate=1):
    teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5)).eval().requires_grad_(False)
    student = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(90)
    x = torch.randn(48, 8, generator=g)
    y = x[:, :5].argmax(1)

    def train(batches, temperature=3.0, alpha=0.5):
        kd = nn.KLDivLoss(reduction="batchmean")
        optimizer.zero_grad()
        for i, (xb, yb) in enumerate(batches):
            logits = student(xb)
            with torch.no_grad():
                teacher_logits = teacher(xb)
            soft = kd(F.log_softmax(logits / temperature, -1), F.softmax(teacher_logits / temperature, -1))
            loss = alpha * F.cross_entropy(logits, yb) + (1.0 - alpha) * soft * temperature**2
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batches=loader(TensorDataset(x, y)),
        fit=train,
    )
