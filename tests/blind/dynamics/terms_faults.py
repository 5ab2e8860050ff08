"""Terms that are reported and not trained as they are reported."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


class VAE(nn.Module):
    def __init__(self, inputs=16, latent=4, width=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.ReLU())
        self.fc_mu = nn.Linear(width, latent)
        self.fc_var = nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, inputs))

    def encode(self, x):
        h = self.encoder(x)
        return self.fc_mu(h), self.fc_var(h)

    def forward(self, x):
        mu, log_var = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        return self.decoder(z), mu, log_var


def kl_divergence(mu, log_var):
    return -0.5 * (1 + log_var - mu.square() - log_var.exp()).sum(1).mean()


def vectors(rows=8, width=16):
    return lambda n: [torch.randn(rows, width) for _ in range(n)]


class BasicVAE:
    """A module with its step, its optimizer and what it logs."""

    def __init__(self, kl_coeff=0.1, lr=1e-3):
        self.net = VAE()
        self.kl_coeff = kl_coeff
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)

    def losses(self, net, x):
        x_hat, mu, log_var = net(x)
        return F.mse_loss(x_hat, x), kl_divergence(mu, log_var)

    def step(self, x):
        recon_loss, kl_loss = self.losses(self.net, x)
        return recon_loss + kl_loss

    def logs(self, net, x):
        recon_loss, kl_loss = self.losses(net, x)
        return {"recon_loss": recon_loss, "kl_loss": (self.kl_coeff, kl_loss)}

    def fit(self, batches):
        for x in batches:
            self.optimizer.zero_grad()
            self.step(x).backward()
            self.optimizer.step()


@fault(
    "terms",
    "kl_coeff=0.1 is stored and reported and never used: step() adds kl_loss with weight 1",
    thread="Lightning-Universe/lightning-bolts#328",
    check="loss_components",
)
def basic_vae():
    module = BasicVAE()
    return TrainLoop(model=module.net, optimizer=module.optimizer, batches=vectors(), fit=module.fit, parts=module.logs)


class Crosscoder(nn.Module):
    def __init__(self, inputs=16, latents=48, k=4):
        super().__init__()
        self.k = k
        self.encoder = nn.Linear(inputs, latents)
        self.decoder = nn.Linear(latents, inputs)

    def forward(self, x):
        pre = self.encoder(x).relu()
        values, index = pre.topk(self.k, -1)
        latents = torch.zeros_like(pre).scatter(-1, index, values)
        return self.decoder(latents), pre, index


class TopKTrainer:
    def __init__(self, lambda_aux=1 / 4, k_aux=8):
        self.model = Crosscoder()
        self.lambda_aux = lambda_aux
        self.k_aux = k_aux
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def aux_loss(self, model, x, recon, pre, index):
        rest = pre.scatter(-1, index, 0.0)
        values, dead = rest.topk(self.k_aux, -1)
        revived = torch.zeros_like(pre).scatter(-1, dead, values)
        return F.mse_loss(model.decoder(revived), (x - recon).detach())

    def calculate_loss_and_log(self, model, x):
        recon, pre, index = model(x)
        reconstruction_loss = F.mse_loss(recon, x)
        aux_loss = self.aux_loss(model, x, recon, pre, index)
        loss = reconstruction_loss + self.lambda_aux * aux_loss
        log = {"reconstruction": reconstruction_loss, "aux": (self.lambda_aux, aux_loss), "loss": loss.detach()}
        return reconstruction_loss, log

    def train(self, batches):
        for x in batches:
            self.optimizer.zero_grad()
            loss, _ = self.calculate_loss_and_log(self.model, x)
            loss.backward()
            self.optimizer.step()

    def parts(self, model, x):
        log = self.calculate_loss_and_log(model, x)[1]
        return {name: log[name] for name in ("reconstruction", "aux")}


@fault(
    "terms",
    "reconstruction_loss is returned for backward() in place of loss: the reported aux term is not trained",
    thread="oclivegriffin/crosscode#3",
    check="loss_components",
)
def crosscoder_topk():
    trainer = TopKTrainer()
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        batches=vectors(16),
        fit=trainer.train,
        parts=trainer.parts,
    )


class RecordingProbe:
    def __init__(self):
        self.features = []

    def __call__(self, module, inputs, output):
        self.features.append(output.detach())

    def clear(self):
        self.features.clear()


class PerceptualLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.net.requires_grad_(False).eval()
        self.probe = RecordingProbe()
        for layer in (self.net[1], self.net[3]):
            layer.register_forward_hook(self.probe)

    def features(self, images):
        self.probe.clear()
        self.net(images)
        return list(self.probe.features)

    def forward(self, fake, real):
        pairs = zip(self.features(fake), self.features(real), strict=True)
        return sum(F.mse_loss(a, b) for a, b in pairs)


@fault(
    "terms",
    "the probe detaches the features it records, so that the perceptual term (weight 1) has no gradient",
    thread="myscience/open-genie#6",
    check="loss_components",
)
def video_tokenizer(perceptual_weight=1.0):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 8, 2, stride=2),
        nn.SiLU(),
        nn.Conv2d(8, 1, 1),
    )
    perceptual = PerceptualLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compute_loss(model, images):
        recon = model(images)
        return {"rec": F.mse_loss(recon, images), "perceptual": (perceptual_weight, perceptual(recon, images))}

    def train(batches):
        for images in batches:
            losses = compute_loss(model, images)
            loss = losses["rec"] + losses["perceptual"][0] * losses["perceptual"][1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [torch.rand(6, 1, 8, 8) for _ in range(n)],
        fit=train,
        parts=compute_loss,
    )


@fault(
    "terms",
    "the restart of the cycle stands inside the loop over batches: kl_weight is set back to kl_start=0 after each "
    "increase, and the KL term never counts",
    thread="valdersoul/bn-vae#1",
    check="loss_components",
)
def cyclic_annealing():
    args = SimpleNamespace(kl_start=0.0, warm_up=10, cycle=1, epochs=1)
    vae = VAE()
    optimizer = torch.optim.SGD(vae.parameters(), lr=0.05)
    state = SimpleNamespace(kl_weight=args.kl_start)

    def terms(model, batch):
        recon, mu, log_var = model(batch)
        return {
            "rec": F.mse_loss(recon, batch, reduction="sum") / len(batch),
            "kl": (state.kl_weight, kl_divergence(mu, log_var)),
        }

    def train(batches):
        anneal_rate = (1.0 - args.kl_start) / args.warm_up
        for epoch in range(args.epochs):
            for batch in batches:
                state.kl_weight = min(1.0, state.kl_weight + anneal_rate)
                if args.cycle > 0 and epoch % args.cycle == 0:
                    state.kl_weight = args.kl_start
                losses = terms(vae, batch)
                loss = losses["rec"] + losses["kl"][0] * losses["kl"][1]
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(vae.parameters(), 5.0)
                optimizer.step()

    return TrainLoop(model=vae, optimizer=optimizer, batches=vectors(), fit=train, parts=terms)


class FlowModule:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(13, 48), nn.SiLU(), nn.Linear(48, 12))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss_name = "se3_vf_loss"

    def model_step(self, model, batch):
        x0 = torch.zeros_like(batch)
        t = torch.full((len(batch), 1), 0.5)
        xt = (1 - t) * x0 + t * batch
        pred = model(torch.cat([xt, t], 1))
        trans_loss = F.mse_loss(pred[:, :6], batch[:, :6])
        rots_loss = F.mse_loss(pred[:, 6:], batch[:, 6:])
        auxiliary_loss = F.l1_loss(torch.cdist(pred, pred), torch.cdist(batch, batch))
        se3_vf_loss = trans_loss + rots_loss
        se3_vf_loss = se3_vf_loss + auxiliary_loss
        return {
            "trans_loss": trans_loss,
            "rots_loss": rots_loss,
            "auxiliary_loss": auxiliary_loss,
            "se3_vf_loss": se3_vf_loss,
        }

    def training_step(self, batch):
        total_losses = self.model_step(self.model, batch)
        return total_losses[self.loss_name] + total_losses["auxiliary_loss"]

    def fit(self, batches):
        for batch in batches:
            loss = self.training_step(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def reported(self, model, batch):
        losses = self.model_step(model, batch)
        losses.pop("se3_vf_loss")
        return losses


@fault(
    "terms",
    "auxiliary_loss is in se3_vf_loss already, and training_step adds it again: it counts twice what is reported",
    thread="microsoft/protein-frame-flow#23",
    check="loss_components",
)
def frame_flow():
    module = FlowModule()
    return TrainLoop(
        model=module.model,
        optimizer=module.optimizer,
        batches=lambda n: [torch.randn(8, 12) for _ in range(n)],
        fit=module.fit,
        parts=module.reported,
        rows_interact=True,
    )


class ReconUpdate:
    """A client's update with an adversarial term against the features of another site."""

    def __init__(self, lambda_adv=0.5):
        self.net_g = nn.ModuleDict({"enc": nn.Linear(16, 24), "dec": nn.Linear(24, 16)})
        self.net_d = nn.Sequential(nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
        self.opt_g = torch.optim.Adam(self.net_g.parameters(), lr=1e-3)
        self.opt_d = torch.optim.Adam(self.net_d.parameters(), lr=1e-3)
        self.lambda_adv = lambda_adv
        self.history = []

    def terms(self, models, batch):
        source, _ = batch
        features = F.leaky_relu(models["g"]["enc"](source), 0.2)
        recon = F.l1_loss(models["g"]["dec"](features), source)
        return {"recon": recon, "adv": (self.lambda_adv, F.softplus(-models["d"](features)).mean())}

    def train(self, batches):
        models = {"g": self.net_g, "d": self.net_d}
        for source, target in batches:
            with torch.no_grad():
                f_source, f_target = (F.leaky_relu(self.net_g["enc"](x), 0.2) for x in (source, target))
            loss_d = F.softplus(-self.net_d(f_target)).mean() + F.softplus(self.net_d(f_source)).mean()
            self.opt_d.zero_grad()
            loss_d.backward()
            self.opt_d.step()
            terms = self.terms(models, (source, target))
            loss_adv_g = terms["adv"][1].detach().item()
            self.history = [*self.history[-9:], loss_adv_g]
            loss = terms["recon"] + self.lambda_adv * loss_adv_g
            self.opt_g.zero_grad()
            loss.backward()
            self.opt_g.step()


@fault(
    "terms",
    "loss_adv_g is made a float with detach().item() before it is added: the adversarial term trains nothing",
    thread="guopengf/FL-MRCM#10",
    check="loss_components",
)
def federated_reconstruction():
    update = ReconUpdate()
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 16) + 1)
    return TrainLoop(
        model={"g": update.net_g, "d": update.net_d},
        optimizer=[update.opt_g, update.opt_d],
        batches=DataLoader(data, batch_size=8, shuffle=True),
        fit=update.train,
        parts=lambda model, batch: update.terms({"g": update.net_g, "d": update.net_d}, batch),
    )


class MoEGate(nn.Module):
    def __init__(self, width=24, experts=4, alpha=0.1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * 0.1)
        self.alpha = alpha

    def forward(self, x):
        scores = F.linear(x, self.weight).softmax(-1)
        value, index = scores.max(-1)
        used = F.one_hot(index, len(self.weight)).float().mean((0, 1))
        aux_loss = (used * scores.mean((0, 1))).sum() * len(self.weight) * self.alpha
        return value, index, aux_loss


class MiniMoE(nn.Module):
    def __init__(self, vocab=30, width=24, experts=4):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.gate = MoEGate(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens, targets):
        x = self.tok(tokens)
        value, index, aux_loss = self.gate(x)
        y = sum((index == i).unsqueeze(-1) * F.silu(e(x)) for i, e in enumerate(self.experts))
        logits = self.out(x + value.unsqueeze(-1) * y)
        last_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return SimpleNamespace(logits=logits, last_loss=last_loss, aux_loss=aux_loss)


@fault(
    "terms",
    "the gate's aux_loss is computed and reported, and train() goes backward from last_loss alone: experts are not "
    "balanced",
    thread="jingyaogong/minimind#140",
    check="loss_components",
)
def mini_moe(accumulate=1):
    model = MiniMoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train(batches):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for step, (x, y) in enumerate(batches, 1):
            out = model(x, y)
            loss = out.last_loss / accumulate
            loss.backward()
            if step % accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def parts(model, batch):
        out = model(*batch)
        return {"lm_loss": out.last_loss, "aux_loss": out.aux_loss}

    text = torch.randint(0, 30, (64, 9))
    data = TensorDataset(text[:, :-1], text[:, 1:])
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, shuffle=True),
        fit=train,
        parts=parts,
        rows_interact=True,
    )


class TabularVAE:
    def __init__(self):
        self.net = VAE(inputs=12)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def feature_losses(self, net, row):
        recon, mu, log_var = net(row)
        numeric = F.mse_loss(recon[:, :8], row[:, :8])
        categorical = F.cross_entropy(recon[:, 8:], row[:, 8:].argmax(1))
        return {"numeric": numeric, "categorical": categorical, "kl_loss": kl_divergence(mu, log_var)}

    def build_loss(self, losses):
        kl_loss = losses["kl_loss"] * 0
        return losses["numeric"] + losses["categorical"] + kl_loss

    def fit(self, batches):
        for row in batches:
            loss = self.build_loss(self.feature_losses(self.net, row))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


@fault(
    "terms",
    "build_loss multiplies kl_loss by 0, while the log shows it as a full term: the latent space is not regularized",
    thread="tdspora/syngen#258",
    check="loss_components",
)
def tabular_generator():
    vae = TabularVAE()
    return TrainLoop(
        model=vae.net,
        optimizer=vae.optimizer,
        batches=vectors(8, 12),
        fit=vae.fit,
        parts=vae.feature_losses,
    )


class MeanTeacher:
    def __init__(self, lambda_u=2.0, ema_m=0.95):
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.ema = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
        self.ema.load_state_dict(self.model.state_dict())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.lambda_u = lambda_u
        self.ema_m = ema_m

    def losses(self, model, batch):
        x_lb, y_lb, x_ulb_w, x_ulb_s = batch
        sup_loss = F.cross_entropy(model(x_lb), y_lb)
        with torch.no_grad():
            outs_x_ulb_w = {"logits": self.ema(x_ulb_w)}
            logits_x_ulb_w = outs_x_ulb_w["logits"]
        outs_x_ulb_s = {"logits": model(x_ulb_s)}
        logits_x_ulb_s = outs_x_ulb_w["logits"]
        unsup_loss = F.mse_loss(logits_x_ulb_s.softmax(-1), logits_x_ulb_w.softmax(-1))
        return {"sup_loss": sup_loss, "unsup_loss": (self.lambda_u, unsup_loss)}, outs_x_ulb_s

    def train(self, batches):
        for batch in batches:
            losses, _ = self.losses(self.model, batch)
            total_loss = losses["sup_loss"] + self.lambda_u * losses["unsup_loss"][1]
            self.optimizer.zero_grad()
            total_loss.backward()
            self.optimizer.step()
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                    e.lerp_(p, 1 - self.ema_m)


@fault(
    "terms",
    "logits_x_ulb_s is read from the weak output: the consistency loss compares the teacher with itself and is 0",
    thread="microsoft/Semi-supervised-learning#102",
    check="loss_components",
)
def mean_teacher():
    algorithm = MeanTeacher()

    def batches(n):
        drawn = []
        for _ in range(n):
            x, u = torch.randn(8, 16), torch.randn(8, 16)
            weak, strong = u + 0.05 * torch.randn_like(u), u + 0.5 * torch.randn_like(u)
            drawn.append((x, x[:, :4].argmax(1), weak, strong))
        return drawn

    return TrainLoop(
        model=algorithm.model,
        optimizer=algorithm.optimizer,
        batches=batches,
        fit=algorithm.train,
        parts=lambda model, batch: algorithm.losses(model, batch)[0],
    )
