"""Terms whose weights move, vanish or are learned, as they are meant to."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


class VAE(nn.Module):
    def __init__(self, inputs=16, latent=4, width=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.ReLU())
        self.moments = nn.Linear(width, 2 * latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, inputs))

    def forward(self, x):
        mu, log_var = self.moments(self.encoder(x)).chunk(2, -1)
        return self.decoder(mu + torch.randn_like(mu) * (0.5 * log_var).exp()), mu, log_var


def kl_per_dim(mu, log_var):
    return 0.5 * (mu.square() + log_var.exp() - 1 - log_var)


def vectors(rows=8, width=16):
    return lambda n: [torch.randn(rows, width) for _ in range(n)]


def weigh(parts):
    return sum(v[0] * v[1] if isinstance(v, tuple) else v for v in parts.values())


def descend(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.seg = nn.Linear(32, 4)
        self.depth = nn.Linear(32, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def losses(self, x, label, depth):
        h = self.body(x)
        return F.cross_entropy(self.seg(h), label), F.l1_loss(self.depth(h), depth)


@right(
    "terms",
    "learned uncertainties weigh the tasks: each has weight exp(-s), and s is a term too: the loss may be negative",
    thread="aharley/simple_bev#13",
)
def uncertainty_weights():
    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def parts(model, batch):
        seg, depth = model.losses(*batch)
        precision = (-model.log_vars).exp()
        return {
            "seg": (precision[0].item(), seg),
            "depth": (precision[1].item(), depth),
            "log_vars": model.log_vars.sum(),
        }

    def train(batches):
        for batch in batches:
            losses = torch.stack(model.losses(*batch))
            descend(optimizer, ((-model.log_vars).exp() * losses + model.log_vars).sum())

    x = torch.randn(96, 12)
    data = TensorDataset(x, x[:, :4].argmax(1), 0.1 * x[:, :1])
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8, shuffle=True), fit=train, parts=parts
    )


class AnnealedVAE:
    def __init__(self, warmup=20):
        self.net = VAE()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.warmup = warmup
        self.global_step = 0

    @property
    def beta(self):
        return min(1.0, self.global_step / self.warmup)

    def parts(self, net, x):
        recon, mu, log_var = net(x)
        return {"recon": F.mse_loss(recon, x), "kl": (self.beta, kl_per_dim(mu, log_var).sum(1).mean())}

    def fit(self, batches):
        for x in batches:
            descend(self.optimizer, weigh(self.parts(self.net, x)))
            self.global_step += 1


@right(
    "terms",
    "KL annealing: the weight is 0 in the first step and rises to 1 over 20 steps",
    thread="theislab/multimil#19",
)
def annealed_kl():
    vae = AnnealedVAE()
    return TrainLoop(model=vae.net, optimizer=vae.optimizer, batches=vectors(), fit=vae.fit, parts=vae.parts)


@right(
    "terms",
    "free bits: below its tolerance the KL is a constant without a gradient, which is the purpose of the clamp",
    thread="hardmaru/WorldModelsExperiments#8",
)
def free_bits(kl_tolerance=0.5, latent=4):
    vae = VAE(latent=latent)
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

    def parts(model, x):
        recon, mu, log_var = model(x)
        kl = kl_per_dim(mu, log_var).sum(1)
        return {
            "r_loss": (recon - x).square().sum(1).mean(),
            "kl_loss": kl.clamp(min=kl_tolerance * latent).mean(),
        }

    def train(batches):
        for x in batches:
            descend(optimizer, weigh(parts(vae, x)))

    return TrainLoop(model=vae, optimizer=optimizer, batches=vectors(), fit=train, parts=parts)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
        self.vf = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))


class PPO:
    def __init__(self, ent_coef=0.0, vf_coef=0.5, clip_range=0.2):
        self.policy = ActorCritic()
        self.ent_coef, self.vf_coef, self.clip_range = ent_coef, vf_coef, clip_range
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-4, eps=1e-5)

    def terms(self, policy, batch):
        dist = torch.distributions.Categorical(logits=policy.pi(batch["obs"]))
        ratio = (dist.log_prob(batch["actions"]) - batch["old_log_prob"]).exp()
        advantages = batch["advantages"]
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        return {
            "policy_gradient_loss": -torch.min(advantages * ratio, advantages * clipped).mean(),
            "value_loss": (self.vf_coef, F.mse_loss(policy.vf(batch["obs"]).squeeze(1), batch["returns"])),
            "entropy_loss": (self.ent_coef, -dist.entropy().mean()),
        }

    def train(self, batches):
        for batch in batches:
            loss = weigh(self.terms(self.policy, batch))
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
            self.optimizer.step()

    def collect(self, n):
        rollouts = []
        for _ in range(n):
            obs = torch.randn(16, 6)
            with torch.no_grad():
                dist = torch.distributions.Categorical(logits=self.policy.pi(obs))
            actions = dist.sample()
            rollouts.append(
                {
                    "obs": obs,
                    "actions": actions,
                    "old_log_prob": dist.log_prob(actions),
                    "advantages": torch.randn(16),
                    "returns": torch.randn(16),
                }
            )
        return rollouts


@right(
    "terms",
    "PPO logs the entropy with ent_coef=0, the library's default: it is watched and not trained, and reported so",
    thread="pytorch/rl#1025",
)
def ppo_without_entropy_bonus():
    agent = PPO()
    return TrainLoop(
        model=agent.policy, optimizer=agent.optimizer, batches=agent.collect, fit=agent.train, parts=agent.terms
    )


class SAC:
    def __init__(self):
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.actor_optim = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic_optim = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.alpha_optim = torch.optim.Adam([self.log_alpha], lr=1e-3)
        self.target_entropy = -1.0

    def sample(self, obs):
        mean, log_std = self.actor(obs).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        u = normal.rsample()
        log_prob = normal.log_prob(u) - (2 * (math.log(2) - u - F.softplus(-2 * u)))
        return torch.tanh(u), log_prob

    def losses(self, obs, act, target):
        critic = F.mse_loss(self.critic(torch.cat([obs, act], 1)), target)
        new, log_prob = self.sample(obs)
        q = self.critic(torch.cat([obs, new], 1))
        actor = (self.log_alpha.exp().detach() * log_prob - q).mean()
        alpha = -(self.log_alpha * (log_prob.detach() + self.target_entropy)).mean()
        return {"critic": critic, "actor": actor, "alpha": alpha}

    def learn(self, batches):
        for batch in batches:
            descend(self.critic_optim, self.losses(*batch)["critic"])
            losses = self.losses(*batch)
            descend(self.actor_optim, losses["actor"])
            descend(self.alpha_optim, losses["alpha"])


@right(
    "terms",
    "SAC: three losses for three optimizers; alpha's takes log_prob detached, and the actor's takes alpha detached",
    thread="DLR-RM/stable-baselines3#36",
)
def soft_actor_critic():
    agent = SAC()

    def replay(n):
        return [(torch.randn(16, 4), torch.rand(16, 1) * 2 - 1, torch.randn(16, 1)) for _ in range(n)]

    return TrainLoop(
        model={"actor": agent.actor, "critic": agent.critic},
        optimizer=[agent.critic_optim, agent.actor_optim, agent.alpha_optim],
        batches=replay,
        fit=agent.learn,
        parts=lambda model, batch: agent.losses(*batch),
    )


class PerceptualLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.net.requires_grad_(False).eval()

    def forward(self, fake, real):
        with torch.no_grad():
            target = self.net(real)
        return F.l1_loss(self.net(fake), target)


@right(
    "terms",
    "the perceptual net is frozen and sees the real images under no_grad; the gradient runs through it to the fakes",
    thread="junyanz/pytorch-CycleGAN-and-pix2pix#822",
)
def perceptual_restoration(lambda_l1=100.0, lambda_vgg=10.0):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    vgg = PerceptualLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def parts(model, batch):
        damaged, clean = batch
        fake = model(damaged)
        return {"G_L1": (lambda_l1, F.l1_loss(fake, clean)), "G_VGG": (lambda_vgg, vgg(fake, clean))}

    def train(batches):
        for batch in batches:
            descend(optimizer, weigh(parts(model, batch)))

    clean = torch.rand(48, 1, 8, 8)
    data = TensorDataset(clean + 0.2 * torch.randn_like(clean), clean)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=6, shuffle=True), fit=train, parts=parts
    )


class SemiSupervised:
    def __init__(self, consistency=0.1, rampup=40.0):
        self.model, self.ema_model = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(2))
        self.ema_model.load_state_dict(self.model.state_dict())
        self.ema_model.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.consistency, self.rampup, self.iter_num = consistency, rampup, 0

    def consistency_weight(self):
        phase = 1.0 - min(self.iter_num, self.rampup) / self.rampup
        return self.consistency * math.exp(-5.0 * phase * phase)

    def parts(self, model, batch):
        x, y, u = batch
        noisy = u + 0.1
        distance = F.mse_loss(model(noisy).softmax(-1), self.ema_model(u).softmax(-1))
        return {"ce": F.cross_entropy(model(x), y), "consistency": (self.consistency_weight(), distance)}

    def train(self, batches):
        for batch in batches:
            descend(self.optimizer, weigh(self.parts(self.model, batch)))
            self.iter_num += 1
            alpha = min(1 - 1 / (self.iter_num + 1), 0.99)
            with torch.no_grad():
                for e, p in zip(self.ema_model.parameters(), self.model.parameters(), strict=True):
                    e.mul_(alpha).add_(p, alpha=1 - alpha)


@right(
    "terms",
    "the consistency weight ramps up from 0.0007 of a final 0.1: tiny at first, as the method wants",
    thread="ycwu1997/MC-Net#5",
)
def consistency_ramp_up():
    method = SemiSupervised()

    def batches(n):
        drawn = [torch.randn(8, 16) for _ in range(n)]
        return [(x, x[:, :4].argmax(1), torch.randn(8, 16)) for x in drawn]

    return TrainLoop(
        model=method.model, optimizer=method.optimizer, batches=batches, fit=method.train, parts=method.parts
    )


class RoutedModel(nn.Module):
    def __init__(self, width=16, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        mixed = sum(probs[:, i : i + 1] * F.silu(e(x)) for i, e in enumerate(self.experts))
        importance = probs.mean(0)
        z_loss = self.router(x).logsumexp(-1).square().mean()
        return self.head(x + mixed), len(self.experts) * importance.square().sum(), z_loss


@right(
    "terms",
    "the router's terms have small coefficients, 0.001 each, and the loss is divided by the micro-batches, while the "
    "report is per batch",
    thread="huggingface/trl#6083",
)
def routed_finetuning(accumulate=1, router_aux_loss_coef=1e-3):
    model = RoutedModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def parts(model, batch):
        x, y = batch
        logits, aux, z = model(x)
        return {
            "ce": F.cross_entropy(logits, y),
            "aux_loss": (router_aux_loss_coef, aux),
            "z_loss": (router_aux_loss_coef, z),
        }

    def train(batches):
        optimizer.zero_grad()
        for i, batch in enumerate(batches, 1):
            (weigh(parts(model, batch)) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    x = torch.randn(96, 16)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8, shuffle=True),
        fit=train,
        parts=parts,
        rows_interact=True,
    )


class DeepSupervised(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.aux = nn.Conv2d(8, 3, 1)
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def forward(self, x):
        h = self.stem(x)
        return self.deep(h), self.aux(h)


@right(
    "terms",
    "train/loss is the base loss without the auxiliary head, which is logged beside it; trained are 1 and 0.4 of them",
    thread="marin-community/marin#2726",
)
def auxiliary_head():
    model = DeepSupervised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    log = []

    def losses(model, batch):
        main, aux = model(batch[0])
        return {"base": F.cross_entropy(main, batch[1]), "aux": (0.4, F.cross_entropy(aux, batch[1]))}

    def train(batches):
        log.clear()
        for batch in batches:
            terms = losses(model, batch)
            log.append({"train/loss": terms["base"].item(), "train/aux": terms["aux"][1].item()})
            descend(optimizer, weigh(terms))

    data = TensorDataset(torch.randn(32, 3, 6, 6), torch.randint(0, 3, (32, 6, 6)))
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=4, shuffle=True), fit=train, parts=losses
    )


class VQGAN:
    def __init__(self, disc_start=4):
        self.ae = nn.ModuleDict({"enc": nn.Linear(16, 24), "dec": nn.Linear(24, 16)})
        self.disc = nn.Sequential(nn.Linear(16, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
        self.opt_ae = torch.optim.Adam(self.ae.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.opt_disc = torch.optim.Adam(self.disc.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.disc_start, self.step = disc_start, 0

    def reconstruct(self, x):
        return self.ae["dec"](F.silu(self.ae["enc"](x)))

    def generator_terms(self, x):
        recon = self.reconstruct(x)
        nll, g_loss = F.l1_loss(recon, x), -self.disc(recon).mean()
        last = self.ae["dec"].weight
        nll_grad = torch.autograd.grad(nll, last, retain_graph=True)[0]
        g_grad = torch.autograd.grad(g_loss, last, retain_graph=True)[0]
        d_weight = (nll_grad.norm() / (g_grad.norm() + 1e-4)).clamp(0, 1e4).item()
        return {"nll": nll, "g_loss": (0.0 if self.step < self.disc_start else 0.8 * d_weight, g_loss)}

    def fit(self, batches):
        for x in batches:
            descend(self.opt_ae, weigh(self.generator_terms(x)))
            d_loss = F.relu(1 - self.disc(x)).mean() + F.relu(1 + self.disc(self.reconstruct(x).detach())).mean()
            descend(self.opt_disc, (0.0 if self.step < self.disc_start else 0.5) * d_loss)
            self.step += 1


@right(
    "terms",
    "the adversarial weight is a ratio of gradient norms, and 0 before disc_start: the generator term begins later",
    thread="CompVis/taming-transformers#93",
)
def adaptive_adversarial_weight():
    gan = VQGAN()
    return TrainLoop(
        model={"ae": gan.ae, "disc": gan.disc},
        optimizer=[gan.opt_ae, gan.opt_disc],
        batches=vectors(),
        fit=gan.fit,
        parts=lambda model, batch: gan.generator_terms(batch),
    )


@right(
    "terms",
    "the terms are sent backward one by one into the same gradients, and never added up in a variable",
    thread="Exscientia/physicsml#18",
)
def backward_term_by_term():
    config = SimpleNamespace(weights={"energy": 1.0, "forces": 10.0})
    model = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def compute_loss(model, batch):
        positions = batch[0].clone().requires_grad_()
        energy = model(positions).squeeze(1)
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
        return {
            "energy": (config.weights["energy"], F.mse_loss(energy, batch[1])),
            "forces": (config.weights["forces"], F.mse_loss(forces, batch[2])),
        }

    def train(batches):
        for batch in batches:
            optimizer.zero_grad()
            for weight, term in compute_loss(model, batch).values():
                (weight * term).backward(retain_graph=True)
            optimizer.step()

    x = torch.randn(64, 9)
    data = TensorDataset(x, x.square().sum(1) / 9, -2 * x / 9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, shuffle=True),
        fit=train,
        parts=compute_loss,
    )


@right(
    "terms",
    "the last of loss_weights [10, 0.1, 1, 0] is 0, kept for clearness since the step makes its constraint hold anyway",
    thread="zhanglijun95/ZoDiac#3",
)
def watermark_latents():
    loss_weights = [10.0, 0.1, 1.0, 0.0]
    decoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    latents = nn.Parameter(torch.randn(8, 16))
    model = nn.ParameterDict({"latents": latents})
    decoder.requires_grad_(False)
    optimizer = torch.optim.Adam([latents], lr=1e-2)
    mark = torch.ones(4)

    def parts(model, batch):
        image = decoder(model["latents"])
        terms = {
            "l2": F.mse_loss(image, batch),
            "total_variation": image.diff(dim=1).abs().mean(),
            "smooth": F.smooth_l1_loss(image, batch),
            "watermark": F.l1_loss(model["latents"][:, :4], mark.expand(8, 4)),
        }
        return {name: (weight, term) for weight, (name, term) in zip(loss_weights, terms.items(), strict=True)}

    def optimize(batches):
        for batch in batches:
            descend(optimizer, weigh(parts(model, batch)))
            with torch.no_grad():
                latents[:, :4] = mark

    return TrainLoop(model=model, optimizer=optimizer, batches=vectors(), fit=optimize, parts=parts)


class VQ(nn.Module):
    def __init__(self, codes=16, width=8):
        super().__init__()
        self.enc, self.dec = nn.Linear(16, width), nn.Linear(width, 16)
        self.codebook = nn.Embedding(codes, width)

    def forward(self, x):
        z = self.enc(x)
        q = self.codebook(torch.cdist(z, self.codebook.weight).argmin(1))
        return self.dec(z + (q - z).detach()), F.mse_loss(q, z.detach()), F.mse_loss(z, q.detach())


@right(
    "terms",
    "VQ-VAE: codebook and commitment are the same number with the other side detached, at weights 1 and 0.25",
    thread="zalandoresearch/pytorch-vq-vae#9",
)
def vector_quantization(commitment_cost=0.25):
    model = VQ()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def parts(model, x):
        recon, codebook, commit = model(x)
        return {"recon": F.mse_loss(recon, x), "codebook": codebook, "commit": (commitment_cost, commit)}

    def train(batches):
        for x in batches:
            descend(optimizer, weigh(parts(model, x)))

    return TrainLoop(model=model, optimizer=optimizer, batches=vectors(16), fit=train, parts=parts)


@right(
    "terms",
    "the KL is averaged over entries like the reconstruction, so that its weight is latents / pixels as in the ELBO",
    thread="wiseodd/generative-models#40",
)
def elbo_in_means():
    vae = VAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

    def parts(model, x):
        recon, mu, log_var = model(x)
        kl = kl_per_dim(mu, log_var).mean()
        return {"recon": 0.5 * F.mse_loss(recon, x), "kl": (mu.shape[1] / x.shape[1], kl)}

    def train(batches):
        for x in batches:
            descend(optimizer, weigh(parts(vae, x)))

    return TrainLoop(model=vae, optimizer=optimizer, batches=vectors(), fit=train, parts=parts)
