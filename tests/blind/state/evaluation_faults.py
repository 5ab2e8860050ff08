"""Evaluations that leave something behind, as projects wrote them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def blobs(n=64, width=12, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=g) * 1.5
    y = torch.randint(0, classes, (n,), generator=g)
    return centers[y] + torch.randn(n, width, generator=g), y


def loaders(batch_size=8, width=12, classes=4):
    x, y = blobs(96, width, classes, seed=1)
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=16)


def text(n, length, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, vocab, (n, 1), generator=g)
    step = torch.randint(1, 4, (n, 1), generator=g)
    return (start + step * torch.arange(length)) % vocab


def mlp(width=12, classes=4, hidden=32, dropout=0.0, norm=False):
    layers = [nn.Linear(width, hidden)]
    if norm:
        layers.append(nn.BatchNorm1d(hidden))
    layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


def train_steps(model, optimizer, batches, loss_fn=F.cross_entropy):
    model.train()
    losses = []
    for x, y in batches:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class EMAModel:
    def __init__(self, parameters, decay=0.9):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in parameters]
        self.stored = None

    @torch.no_grad()
    def step(self, parameters):
        for s, p in zip(self.shadow, parameters, strict=False):
            s.lerp_(p, 1 - self.decay)

    def store(self, parameters):
        self.stored = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters):
        for s, p in zip(self.shadow, parameters, strict=False):
            p.copy_(s)

    @torch.no_grad()
    def restore(self, parameters):
        for s, p in zip(self.stored, parameters, strict=False):
            p.copy_(s)


@fault(
    "evaluation",
    "the EMA weights stay in the model: copy_to() without restore()",
    thread="PKU-YuanGroup/Open-Sora-Plan#186",
    check="evaluation_is_pure",
)
def text_to_video():
    train_loader, val_loader = loaders()
    denoiser = mlp(12, 12)
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=3e-3)
    ema = EMAModel(denoiser.parameters())

    def fit(batches):
        denoiser.train()
        for latents, _ in batches:
            noise = torch.randn_like(latents)
            loss = F.mse_loss(denoiser(latents + noise), noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.step(denoiser.parameters())

    def log_validation():
        ema.store(denoiser.parameters())
        ema.copy_to(denoiser.parameters())
        denoiser.eval()
        g = torch.Generator().manual_seed(42)
        errors = []
        with torch.no_grad():
            for latents, _ in val_loader:
                noise = torch.randn(latents.shape, generator=g)
                errors.append(F.mse_loss(denoiser(latents + noise), noise).item())
        denoiser.train()
        return sum(errors) / len(errors)

    return TrainLoop(model=denoiser, optimizer=optimizer, batches=train_loader, fit=fit, evaluate=log_validation)


@fault(
    "evaluation",
    "the backup of the weights is a list of references (p.data), so restoring after the EMA is swapped in does nothing",
    thread="atomistic-machine-learning/schnetpack#785",
    check="evaluation_is_pure",
)
def ema_backup():
    train_loader, val_loader = loaders()
    model = mlp(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    class WeightEMA:
        def __init__(self, net):
            self.shadow = {k: v.detach().clone() for k, v in net.named_parameters()}
            self.backup = {}

        def update(self, net):
            for k, v in net.named_parameters():
                self.shadow[k] = 0.9 * self.shadow[k] + 0.1 * v.detach()

        def apply_shadow(self, net):
            for k, v in net.named_parameters():
                self.backup[k] = v.data
                v.data.copy_(self.shadow[k])

        def restore(self, net):
            for k, v in net.named_parameters():
                v.data.copy_(self.backup[k])
            self.backup = {}

    ema = WeightEMA(model)

    def train(batches):
        for x, y in batches:
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ema.update(model)

    def validate():
        ema.apply_shadow(model)
        model.eval()
        with torch.no_grad():
            hits = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
        ema.restore(model)
        return hits / len(val_loader.dataset)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validate)


@fault(
    "evaluation",
    "model.eval() in validate() is never undone: train() is called once in the trainer's constructor",
    thread="wkentaro/pytorch-fcn#56",
    check="evaluation_is_pure",
)
def segmentation_trainer():
    class Trainer:
        def __init__(self, model, optimizer, train_loader, val_loader):
            self.model, self.optim = model, optimizer
            self.train_loader, self.val_loader = train_loader, val_loader
            self.iteration = 0
            self.best_iu = 0
            self.model.train()

        def validate(self):
            self.model.eval()
            ious = []
            for data, target in self.val_loader:
                with torch.no_grad():
                    score = self.model(data)
                pred = score.argmax(1)
                for c in range(3):
                    union = ((pred == c) | (target == c)).sum().item()
                    if union:
                        ious.append(((pred == c) & (target == c)).sum().item() / union)
            iu = float(np.mean(ious))
            self.best_iu = max(iu, self.best_iu)
            return iu

        def train(self, batches):
            for data, target in batches:
                self.iteration += 1
                self.optim.zero_grad()
                loss = F.cross_entropy(self.model(data), target, reduction="sum") / len(data) / 64
                loss.backward()
                self.optim.step()

    g = torch.Generator().manual_seed(3)
    images = torch.randn(24, 3, 8, 8, generator=g)
    labels = (images.mean(1) * 3).long().clamp(-1, 1) + 1
    data = TensorDataset(images, labels)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(8, 3, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(model, optimizer, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))
    return TrainLoop(
        model=model, optimizer=optimizer, batches=trainer.train_loader, fit=trainer.train, evaluate=trainer.validate
    )


@fault(
    "evaluation",
    "the running statistics of the batch norms move in validation, which runs the detector in train mode "
    "to get its losses",
    thread="wdoppenberg/ellipse-rcnn#13",
    check="evaluation_is_pure",
)
def detector_losses():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            self.boxes = nn.Linear(8 * 16, 4)
            self.labels = nn.Linear(8 * 16, 3)

        def forward(self, images, targets=None):
            feats = self.backbone(torch.stack(images)).flatten(1)
            boxes, logits = self.boxes(feats), self.labels(feats)
            if self.training:
                gt = torch.stack([t["boxes"][0] for t in targets])
                cls = torch.stack([t["labels"][0] for t in targets])
                return {"loss_box": F.smooth_l1_loss(boxes, gt), "loss_cls": F.cross_entropy(logits, cls)}
            return [{"boxes": b[None], "scores": s.softmax(0)} for b, s in zip(boxes, logits, strict=False)]

    g = torch.Generator().manual_seed(0)

    def sample(shift):
        label = torch.randint(0, 3, (1,), generator=g)
        image = torch.randn(1, 8, 8, generator=g) + label + shift
        return image, {"boxes": torch.rand(1, 4, generator=g), "labels": label}

    def collate(items):
        return tuple(zip(*items, strict=False))

    train_loader = DataLoader([sample(0.0) for _ in range(32)], batch_size=4, shuffle=True, collate_fn=collate)
    val_loader = DataLoader([sample(0.5) for _ in range(8)], batch_size=4, collate_fn=collate)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    def train_one_epoch(batches):
        model.train()
        for images, targets in batches:
            loss = sum(model(list(images), list(targets)).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def validation_loss():
        model.train(True)
        total = 0.0
        for images, targets in val_loader:
            total += sum(model(list(images), list(targets)).values()).item()
        return total / len(val_loader)

    return TrainLoop(
        model=model, optimizer=optimizer, batches=train_loader, fit=train_one_epoch, evaluate=validation_loss
    )


@fault(
    "evaluation",
    "torch.set_grad_enabled(False) is not switched back on after the evaluation loop",
    thread="Lightning-AI/pytorch-lightning#2180",
    check="evaluation_is_pure",
)
def grad_mode():
    train_loader, val_loader = loaders()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def evaluation_loop():
        model.eval()
        torch.set_grad_enabled(False)
        outputs = [{"val_loss": F.cross_entropy(model(x), y), "n": len(y)} for x, y in val_loader]
        model.train()
        return sum(o["val_loss"].item() * o["n"] for o in outputs) / sum(o["n"] for o in outputs)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluation_loop,
    )


@fault(
    "evaluation",
    "F.dropout without training=self.training drops attention scores in evaluation too",
    thread="rixwew/pytorch-fm#21",
    check="evaluation_is_pure",
)
def factorization_machine():
    class AttentionalFM(nn.Module):
        def __init__(self, fields=5, vocab=20, dim=8):
            super().__init__()
            self.embedding = nn.Embedding(fields * vocab, dim)
            self.register_buffer("offsets", torch.arange(fields) * vocab)
            self.attention, self.projection = nn.Linear(dim, dim), nn.Linear(dim, 1)
            self.fc = nn.Linear(dim, 1)
            self.row, self.col = torch.triu_indices(fields, fields, 1)

        def forward(self, x):
            e = self.embedding(x + self.offsets)
            inner = e[:, self.row] * e[:, self.col]
            scores = F.softmax(self.projection(F.relu(self.attention(inner))), dim=1)
            scores = F.dropout(scores, p=0.2)
            out = F.dropout((scores * inner).sum(1), p=0.2, training=self.training)
            return self.fc(out).squeeze(1)

    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 20, (96, 5), generator=g)
    y = ((x[:, 0] + x[:, 1]) % 2).float()
    train_loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16)
    model = AttentionalFM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def test():
        model.eval()
        with torch.no_grad():
            scores = torch.cat([model(fields).sigmoid() for fields, _ in val_loader])
        return F.binary_cross_entropy(scores, torch.cat([t for _, t in val_loader])).item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches, F.binary_cross_entropy_with_logits),
        evaluate=test,
    )


@fault(
    "evaluation",
    "torch.manual_seed(0) for the sampled images sets the global generator, so that each epoch trains "
    "with the same noise",
    thread="huggingface/diffusers#175",
    check="evaluation_is_pure",
)
def unconditional_diffusion():
    train_loader, _ = loaders()
    net = nn.Sequential(nn.Linear(13, 48), nn.SiLU(), nn.Linear(48, 12))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    alphas = torch.linspace(0.999, 0.05, 20)

    def noise_pred(x, t):
        return net(torch.cat([x, t[:, None] / 20], 1))

    def train(batches):
        for clean, _ in batches:
            noise = torch.randn(clean.shape)
            t = torch.randint(0, 20, (len(clean),))
            a = alphas[t][:, None]
            loss = F.mse_loss(noise_pred(a.sqrt() * clean + (1 - a).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def sample_images():
        net.eval()
        torch.manual_seed(0)
        x = torch.randn(6, 12)
        for i in reversed(range(20)):
            eps = noise_pred(x, torch.full((6,), i))
            x = (x - (1 - alphas[i]).sqrt() * eps) / alphas[i].sqrt().clamp(min=0.3)
            x = x.clamp(-4, 4)
        net.train()
        return x.std().item()

    return TrainLoop(model=net, optimizer=optimizer, batches=train_loader, fit=train, evaluate=sample_images)


@fault(
    "evaluation",
    "loss_compute calls backward() on the validation loss, and the gradients are added to the next training step",
    thread="harvardnlp/annotated-transformer#14",
    check="evaluation_is_pure",
)
def annotated_transformer():
    vocab = 16

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocab, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.generator = nn.Linear(16, vocab)

        def forward(self, src):
            mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1])
            return self.layer(self.embed(src), src_mask=mask)

    class SimpleLossCompute:
        def __init__(self, generator, opt=None):
            self.generator, self.opt = generator, opt

        def __call__(self, x, y):
            loss = F.cross_entropy(self.generator(x).flatten(0, 1), y.flatten())
            loss.backward()
            if self.opt is not None:
                self.opt.step()
                self.opt.zero_grad()
            return loss.item()

    def run_epoch(data, model, loss_compute):
        return [loss_compute(model(tokens[:, :-1]), tokens[:, 1:]) for tokens in data]

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_data, val_data = text(48, 9, vocab, 0).split(8), text(16, 9, vocab, 1).split(8)

    def train(batches):
        model.train()
        run_epoch(batches, model, SimpleLossCompute(model.generator, optimizer))

    def evaluate():
        model.eval()
        return run_epoch(val_data, model, SimpleLossCompute(model.generator, None))

    return TrainLoop(model=model, optimizer=optimizer, batches=list(train_data), fit=train, evaluate=evaluate)


@fault(
    "evaluation",
    "the FGSM attack of the robust accuracy leaves gradients on the weights, and they add to the "
    "accumulation in progress",
    thread="BorealisAI/advertorch#113",
    check="evaluation_is_pure",
)
def robust_accuracy():
    train_loader, val_loader = loaders()
    model = mlp(hidden=48)

    @dataclass
    class Config:
        lr: float = 0.05
        accumulate: int = 2
        eps: float = 0.1
        optimizer: torch.optim.Optimizer = field(init=False)

    cfg = Config()
    cfg.optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)

    def train(batches):
        model.train()
        for i, (x, y) in enumerate(batches, 1):
            (F.cross_entropy(model(x), y) / cfg.accumulate).backward()
            if i % cfg.accumulate == 0:
                cfg.optimizer.step()
                cfg.optimizer.zero_grad()

    def evaluate_robust():
        model.eval()
        correct = 0
        for x, y in val_loader:
            x_adv = x.clone().requires_grad_(True)
            F.cross_entropy(model(x_adv), y).backward()
            x_adv = (x + cfg.eps * x_adv.grad.sign()).detach()
            with torch.no_grad():
                correct += (model(x_adv).argmax(1) == y).sum().item()
        model.train()
        return correct / len(val_loader.dataset)

    return TrainLoop(model=model, optimizer=cfg.optimizer, batches=train_loader, fit=train, evaluate=evaluate_robust)


@fault(
    "evaluation",
    "eval() merges the low-rank update into the base weight and train() never subtracts it again",
    thread="microsoft/LoRA#61",
    check="evaluation_is_pure",
)
def lora_linear():
    class LoRALinear(nn.Linear):
        def __init__(self, fin, fout, r=4, alpha=8):
            super().__init__(fin, fout)
            self.weight.requires_grad_(False)
            self.lora_A = nn.Parameter(torch.randn(r, fin) * 0.1)
            self.lora_B = nn.Parameter(torch.zeros(fout, r))
            self.scaling, self.merged = alpha / r, False

        def train(self, mode=True):
            super().train(mode)
            if not mode and not self.merged:
                self.weight.data += self.lora_B.data @ self.lora_A.data * self.scaling
                self.merged = True
            elif mode:
                self.merged = False
            return self

        def forward(self, x):
            out = F.linear(x, self.weight, self.bias)
            return out if self.merged else out + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling

    train_loader, val_loader = loaders()
    model = nn.Sequential(LoRALinear(12, 32), nn.GELU(), LoRALinear(32, 4))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)

    def evaluate():
        model.eval()
        with torch.no_grad():
            return sum(F.cross_entropy(model(x), y).item() for x, y in val_loader)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@fault(
    "evaluation",
    "the validation pipeline casts the live network to bfloat16 and back, which rounds its weights",
    thread="huggingface/diffusers#13895",
    check="evaluation_is_pure",
)
def dreambooth_lora():
    class Pipeline:
        def __init__(self, unet):
            self.unet = unet

        def to(self, dtype):
            self.unet.to(dtype=dtype)
            return self

        @torch.no_grad()
        def __call__(self, prompt):
            return self.unet(prompt)

    train_loader, val_loader = loaders()
    unet = mlp(12, 12)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)

    def fit(batches):
        for latents, _ in batches:
            noise = torch.randn_like(latents)
            loss = F.mse_loss(unet(latents + 0.5 * noise), noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def log_validation():
        pipeline = Pipeline(unet).to(torch.bfloat16)
        images = [pipeline(x.bfloat16()).float() for x, _ in val_loader]
        unet.to(torch.float32)
        return torch.cat(images).std().item()

    return TrainLoop(model=unet, optimizer=optimizer, batches=train_loader, fit=fit, evaluate=log_validation)


class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        delta, n = x.mean(0) - self.mean, len(x)
        total = self.count + n
        self.mean = self.mean + delta * n / total
        self.var = (self.var * self.count + x.var(0) * n + delta**2 * self.count * n / total) / total
        self.count = total


class VecNormalize:
    def __init__(self, dim, training=True):
        self.obs_rms, self.training = RunningMeanStd(dim), training

    def __call__(self, obs):
        obs = np.asarray(obs, dtype=np.float64)
        if self.training:
            self.obs_rms.update(obs)
        scaled = (obs - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + 1e-8)
        return torch.as_tensor(scaled, dtype=torch.float32).clamp(-10, 10)


@fault(
    "evaluation",
    "the evaluation environment shares VecNormalize with training and updates obs_rms (training=True)",
    thread="DLR-RM/rl-baselines3-zoo#275",
    check="evaluation_is_pure",
)
def vec_normalize():
    policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    normalize = VecNormalize(6)
    rng = np.random.default_rng(0)

    def rollouts(n):
        return [
            {"obs": rng.normal(2.0, 3.0, (16, 6)), "act": rng.integers(0, 3, 16), "adv": rng.normal(size=16)}
            for _ in range(n)
        ]

    def learn(batches):
        for data in batches:
            logits = policy(normalize(data["obs"]))
            logp = torch.distributions.Categorical(logits=logits).log_prob(torch.as_tensor(data["act"]))
            loss = -(logp * torch.as_tensor(data["adv"], dtype=torch.float32)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def evaluate_policy(episodes=3):
        env_rng = np.random.default_rng(123)
        rewards = []
        for _ in range(episodes):
            obs = env_rng.normal(-4.0, 1.0, (10, 6))
            with torch.no_grad():
                actions = policy(normalize(obs)).argmax(1)
            rewards.append(float((actions == 1).float().sum()))
        return float(np.mean(rewards))

    return TrainLoop(model=policy, optimizer=optimizer, batches=rollouts, fit=learn, evaluate=evaluate_policy)


@fault(
    "evaluation",
    "the rotary cache is rebuilt for longer sequences under inference_mode and kept: training then fails "
    "on inference tensors",
    thread="snowflakedb/ArcticTraining#265",
    check="evaluation_is_pure",
)
def rotary_cache():
    vocab, dim = 24, 16

    class Rotary:
        def __init__(self):
            self.cos = self.sin = None

        def __call__(self, x):
            length = x.shape[1]
            if self.cos is None or self.cos.shape[0] < length:
                freqs = torch.outer(torch.arange(length), 1.0 / 100 ** (torch.arange(0, dim, 2) / dim))
                self.cos, self.sin = freqs.cos().repeat(1, 2), freqs.sin().repeat(1, 2)
            a, b = x.chunk(2, -1)
            return x * self.cos[:length] + torch.cat([-b, a], -1) * self.sin[:length]

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rotary = nn.Embedding(vocab, dim), Rotary()
            self.qkv, self.head = nn.Linear(dim, 3 * dim), nn.Linear(dim, vocab)

        def forward(self, tokens):
            q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
            att = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
            return self.head(att)

    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_data, val_data = text(64, 9, vocab, 0), text(8, 17, vocab, 1)

    def lm_loss(tokens):
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def train(batches):
        model.train()
        for tokens in batches:
            optimizer.zero_grad()
            lm_loss(tokens).backward()
            optimizer.step()

    @torch.inference_mode()
    def evaluate():
        model.eval()
        perplexity = math.exp(lm_loss(val_data).item())
        model.train()
        return perplexity

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(train_data, batch_size=8), fit=train, evaluate=evaluate
    )


@fault(
    "evaluation",
    "the best state is loaded into the live model to report its accuracy and the current weights are not put back",
    thread="facebookresearch/audiocraft#267",
    check="evaluation_is_pure",
)
def best_state_solver():
    class Solver:
        def __init__(self, valid_every=5):
            self.train_loader, self.val_loader = loaders()
            self.model = mlp(norm=True)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
            self.valid_every, self.steps, self.best_loss = valid_every, 0, float("inf")
            self.keep_best()

        @torch.no_grad()
        def keep_best(self):
            self.model.eval()
            loss = sum(F.cross_entropy(self.model(x), y).item() for x, y in self.val_loader)
            self.model.train()
            if loss < self.best_loss:
                self.best_loss, self.best_state = loss, copy.deepcopy(self.model.state_dict())

        def train(self, batches):
            self.model.train()
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.steps += 1
                if self.steps % self.valid_every == 0:
                    self.keep_best()

        @torch.no_grad()
        def evaluate(self):
            self.model.load_state_dict(self.best_state)
            self.model.eval()
            hits = sum((self.model(x).argmax(1) == y).sum().item() for x, y in self.val_loader)
            self.model.train()
            return {"accuracy": hits / len(self.val_loader.dataset), "loss": self.best_loss}

    solver = Solver()
    return TrainLoop(
        model=solver.model,
        optimizer=solver.optimizer,
        batches=solver.train_loader,
        fit=solver.train,
        evaluate=solver.evaluate,
    )


@fault(
    "evaluation",
    "the shared step() counts validation batches in self.global_step, which drives the annealing of beta",
    thread="nmichlo/disent#27",
    check="evaluation_is_pure",
)
def beta_annealing():
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(12, 8), nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 12))
            self.global_step, self.anneal_steps = 0, 40

        def step(self, x):
            mu, logvar = self.encoder(x).chunk(2, -1)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
            recon = F.mse_loss(self.decoder(z), x)
            kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
            beta = min(1.0, self.global_step / self.anneal_steps)
            self.global_step += 1
            return recon + beta * kl

        def training_step(self, batch):
            return self.step(batch[0])

        def validation_step(self, batch):
            return {"val_loss": self.step(batch[0])}

    train_loader, val_loader = loaders()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def fit(batches):
        model.train()
        for batch in batches:
            loss = model.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def validate():
        model.eval()
        outs = [model.validation_step(batch) for batch in val_loader]
        model.train()
        return torch.stack([o["val_loss"] for o in outs]).mean().item()

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=fit, evaluate=validate)


@fault(
    "evaluation",
    "the score standardizes self.x in place: the validation series is a view of the tensor that training reads",
    thread="pytorch/vision#680",
    check="evaluation_is_pure",
)
def standardized_series():
    class Windows(Dataset):
        def __init__(self, series, size=8):
            self.x, self.size = series, size

        def __len__(self):
            return len(self.x) - self.size

        def __getitem__(self, i):
            return self.x[i : i + self.size], self.x[i + self.size]

        def standardize(self, mean, std):
            self.x.sub_(mean).div_(std)
            return self

    g = torch.Generator().manual_seed(0)
    series = torch.cumsum(torch.randn(72, generator=g), 0) * 0.3 + 5.0
    train_set = Windows(series)
    mean, std = series.mean(), series.std()
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for past, future in batches:
            pred = model((past - mean) / std).squeeze(1)
            loss = F.mse_loss(pred, (future - mean) / std)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def score():
        val = Windows(series[48:]).standardize(mean, std)
        x, y = zip(*[val[i] for i in range(len(val))], strict=False)
        return F.l1_loss(model(torch.stack(x)).squeeze(1), torch.stack(y)).item()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(train_set, batch_size=8), fit=fit, evaluate=score
    )


@fault(
    "evaluation",
    "validation() freezes all parameters and afterwards sets requires_grad=True for all, so that the "
    "frozen backbone trains",
    thread="clovaai/deep-text-recognition-benchmark#47",
    check="evaluation_is_pure",
)
def text_recognition():
    train_loader, val_loader = loaders()
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(12, 24), nn.ReLU()), "head": nn.Linear(24, 4)})
    for p in model["backbone"].parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def forward(x):
        return model["head"](model["backbone"](x))

    def train(batches):
        model.train()
        for image, label in batches:
            cost = F.cross_entropy(forward(image), label)
            model.zero_grad()
            cost.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    def validation():
        model.eval()
        for p in model.parameters():
            p.requires_grad = False
        hits = sum((forward(x).argmax(1) == y).sum().item() for x, y in val_loader)
        for p in model.parameters():
            p.requires_grad = True
        model.train()
        return hits / len(val_loader.dataset)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validation)


@fault(
    "evaluation",
    "model.train() after validation also switches the batch norms that freeze() had put in evaluation mode",
    thread="pgniewko/gt-pyg#112",
    check="evaluation_is_pure",
)
def frozen_encoder_norm():
    class GraphNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU())
            self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(24, 4))

        def forward(self, nodes, adjacency):
            h = self.encoder(nodes)
            return self.head(adjacency @ h / adjacency.sum(1, keepdim=True))

        def freeze(self):
            for p in self.encoder.parameters():
                p.requires_grad = False
            for m in self.encoder.modules():
                if isinstance(m, nn.BatchNorm1d):
                    m.eval()

    g = torch.Generator().manual_seed(0)

    def graph():
        x, y = blobs(16, seed=int(torch.randint(0, 1000, (1,), generator=g)))
        return {"x": x, "adj": (torch.rand(16, 16, generator=g) > 0.7).float() + torch.eye(16), "y": y}

    graphs, held_out = [graph() for _ in range(8)], graph()
    model = GraphNet()
    model.freeze()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def fit(batches):
        for data in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(data["x"], data["adj"]), data["y"]).backward()
            optimizer.step()

    def evaluate():
        model.eval()
        with torch.no_grad():
            acc = (model(held_out["x"], held_out["adj"]).argmax(1) == held_out["y"]).float().mean().item()
        model.train()
        return acc

    return TrainLoop(model=model, optimizer=optimizer, batches=graphs, fit=fit, evaluate=evaluate, frozen=("encoder.",))


@fault(
    "evaluation",
    "the state of the recurrent net after the validation text stays in self.hidden and the next training "
    "window starts from it",
    thread="keon/seq2seq#8",
    check="evaluation_is_pure",
)
def stateful_language_model():
    vocab = 20

    class CharRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(vocab, 12), nn.GRU(12, 24, batch_first=True)
            self.out, self.hidden = nn.Linear(24, vocab), None

        def forward(self, tokens):
            if self.hidden is not None:
                self.hidden = self.hidden.detach()
            y, self.hidden = self.rnn(self.embed(tokens), self.hidden)
            return self.out(y)

    corpus = text(4, 65, vocab, 0)
    windows = [corpus[:, i : i + 9] for i in range(0, 56, 8)]
    held_out = text(4, 17, vocab, 9)
    model = CharRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss_of(tokens):
        return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    def train(batches):
        model.train()
        for tokens in batches:
            optimizer.zero_grad()
            loss_of(tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    @torch.no_grad()
    def bits_per_char():
        model.eval()
        model.hidden = None
        bpc = loss_of(held_out).item() / math.log(2)
        model.train()
        return bpc

    return TrainLoop(model=model, optimizer=optimizer, batches=windows, fit=train, evaluate=bits_per_char)


@fault(
    "evaluation",
    "the EMA update of the codebook (cluster_size, embed_avg, embed) has no check for self.training and "
    "runs in validation",
    thread="lucidrains/vector-quantize-pytorch#61",
    check="evaluation_is_pure",
)
def vq_codebook():
    class Quantizer(nn.Module):
        def __init__(self, codes=16, dim=6):
            super().__init__()
            self.register_buffer("embed", torch.randn(codes, dim))
            self.register_buffer("embed_avg", self.embed.clone())
            self.register_buffer("cluster_size", torch.ones(codes))

        def forward(self, z):
            index = torch.cdist(z, self.embed).argmin(1)
            quantized = self.embed[index]
            with torch.no_grad():
                onehot = F.one_hot(index, len(self.embed)).float()
                self.cluster_size.lerp_(onehot.sum(0), 0.1)
                self.embed_avg.lerp_(onehot.T @ z, 0.1)
                self.embed.copy_(self.embed_avg / self.cluster_size.clamp(min=1e-3)[:, None])
            commit = F.mse_loss(z, quantized)
            return z + (quantized - z).detach(), commit

    class VQVAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.vq = nn.Linear(12, 6), Quantizer()
            self.dec = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 12))

        def forward(self, x):
            q, commit = self.vq(self.enc(x))
            return self.dec(q), commit

    train_loader, val_loader = loaders()
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(batches):
        model.train()
        for x, _ in batches:
            recon, commit = model(x)
            loss = F.mse_loss(recon, x) + 0.25 * commit
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def validate():
        model.eval()
        return sum(F.mse_loss(model(x)[0], x).item() for x, _ in val_loader)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validate)


@fault(
    "evaluation",
    "evaluate() raises: .numpy() is called on outputs that require grad (no torch.no_grad())",
    thread="https://stackoverflow.com/questions/55466298",
    check="evaluation_is_pure",
)
def numpy_scores():
    train_loader, val_loader = loaders()
    model = mlp(dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def evaluate():
        model.eval()
        scores, targets = [], []
        for x, y in val_loader:
            scores.append(model(x).softmax(1).numpy())
            targets.append(y.numpy())
        model.train()
        return float((np.concatenate(scores).argmax(1) == np.concatenate(targets)).mean())

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@fault(
    "evaluation",
    "torch.set_default_dtype(torch.float64) for exact metrics is left on, so that the noise of training "
    "becomes float64",
    thread="cics-nd/gptorch#14",
    check="evaluation_is_pure",
)
def exact_metrics():
    train_loader, val_loader = loaders()
    model = mlp(hidden=24)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train(batches):
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x + 0.1 * torch.randn(x.shape)), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def calibration_error():
        torch.set_default_dtype(torch.float64)
        model.eval()
        bins = torch.zeros(10)
        with torch.no_grad():
            for x, y in val_loader:
                confidence, pred = model(x).double().softmax(1).max(1)
                index = (confidence * 10).long().clamp(max=9)
                bins.index_add_(0, index, confidence - (pred == y).double())
        model.train()
        return bins.abs().sum().item() / len(val_loader.dataset)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=calibration_error)


@fault(
    "evaluation",
    "augment.enabled is switched off for the clean training accuracy and never switched on again",
    thread="paninski-lab/lightning-pose#181",
    check="evaluation_is_pure",
)
def batch_augmentation():
    class Augment:
        def __init__(self):
            self.enabled = True

        def __call__(self, x):
            if not self.enabled:
                return x
            return x * (1 + 0.2 * torch.randn(len(x), 1)) + 0.1 * torch.randn_like(x)

    class Runner:
        def __init__(self):
            self.loader, self.val_loader = loaders()
            self.model, self.augment = mlp(), Augment()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def accuracy(self, loader):
            hits = sum((self.model(self.augment(x)).argmax(1) == y).sum().item() for x, y in loader)
            return hits / len(loader.dataset)

        def run_epoch(self, batches):
            self.model.train()
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(self.augment(x)), y).backward()
                self.optimizer.step()

        @torch.no_grad()
        def evaluate(self):
            self.augment.enabled = False
            self.model.eval()
            return {"train": self.accuracy(self.loader), "val": self.accuracy(self.val_loader)}

    runner = Runner()
    return TrainLoop(
        model=runner.model,
        optimizer=runner.optimizer,
        batches=runner.loader,
        fit=runner.run_epoch,
        evaluate=runner.evaluate,
    )


@fault(
    "evaluation",
    "teacher_forcing_ratio is set to 0 on the decoder for greedy decoding and stays 0 in training",
    thread="keon/seq2seq#9",
    check="evaluation_is_pure",
)
def seq2seq_decoder():
    vocab = 12

    class Seq2Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocab, 12)
            self.encoder, self.cell = nn.GRU(12, 20, batch_first=True), nn.GRUCell(12, 20)
            self.out, self.teacher_forcing_ratio = nn.Linear(20, vocab), 0.7

        def forward(self, src, trg):
            h = self.encoder(self.embed(src))[1][0]
            token, steps = trg[:, 0], []
            for t in range(1, trg.shape[1]):
                h = self.cell(self.embed(token), h)
                steps.append(self.out(h))
                forced = torch.rand(()).item() < self.teacher_forcing_ratio
                token = trg[:, t] if forced else steps[-1].argmax(1)
            return torch.stack(steps, 2)

    data = text(48, 8, vocab, 0)
    pairs = DataLoader(TensorDataset(data, data.flip(1)), batch_size=8)
    val_src = text(8, 8, vocab, 5)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train(batches):
        model.train()
        for src, trg in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(src, trg), trg[:, 1:]).backward()
            optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        model.teacher_forcing_ratio = 0.0
        trg = val_src.flip(1)
        return (model(val_src, trg).argmax(1) == trg[:, 1:]).float().mean().item()

    return TrainLoop(model=model, optimizer=optimizer, batches=pairs, fit=train, evaluate=evaluate)


@fault(
    "evaluation",
    "generate() fills self.past (key and value cache) and leaves it: the next training forward attends "
    "to the generated text",
    thread="huggingface/transformers#42586",
    check="evaluation_is_pure",
)
def generation_cache():
    vocab, dim = 20, 16

    class CachedAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.past, self.use_cache = nn.Linear(dim, 3 * dim), None, False

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            if self.past is not None and self.past[0].shape[0] == k.shape[0]:
                k, v = torch.cat([self.past[0], k], 1), torch.cat([self.past[1], v], 1)
            if self.use_cache:
                self.past = (k.detach(), v.detach())
            new, total = q.shape[1], k.shape[1]
            mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention, self.head = nn.Embedding(vocab, dim), CachedAttention(), nn.Linear(dim, vocab)

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.head(x + self.attention(x))

        @torch.no_grad()
        def generate(self, prompt, new=4):
            self.attention.past, self.attention.use_cache = None, True
            tokens, step = prompt, prompt
            for _ in range(new):
                step = self(step)[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, step], 1)
            self.attention.use_cache = False
            return tokens

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = text(48, 9, vocab, 0)
    prompts = text(8, 9, vocab, 3)

    def fit(batches):
        model.train()
        for tokens in batches:
            loss = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def evaluate():
        model.eval()
        out = model.generate(prompts[:, :5])
        model.train()
        return (out[:, 5:] == prompts[:, 5:9]).float().mean().item()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8), fit=fit, evaluate=evaluate
    )


@fault(
    "evaluation",
    "the forward hook that detaches features for the t-SNE plot is registered in evaluate() and never removed",
    thread="meta-pytorch/opacus#176",
    check="evaluation_is_pure",
)
def feature_hook():
    train_loader, val_loader = loaders()
    model = mlp(hidden=24)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def embed(loader):
        features = []

        def grab(module, args, output):
            output = output.detach()
            features.append(output)
            return output

        model[1].register_forward_hook(grab)
        for x, _ in loader:
            model(x)
        return torch.cat(features)

    def evaluate():
        model.eval()
        z = embed(val_loader)
        model.train()
        return torch.pdist(z).mean().item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@fault(
    "evaluation",
    "fuse() folds the batch norms into the live convolutions before validation, and training goes on without them",
    thread="ultralytics/yolov5#4034",
    check="evaluation_is_pure",
)
def fused_convolutions():
    class Conv(nn.Module):
        def __init__(self, c1, c2):
            super().__init__()
            self.conv, self.bn, self.act = nn.Conv2d(c1, c2, 3, padding=1, bias=False), nn.BatchNorm2d(c2), nn.SiLU()

        def forward(self, x):
            return self.act(self.bn(self.conv(x)))

        @torch.no_grad()
        def fuse(self):
            scale = self.bn.weight / (self.bn.running_var + self.bn.eps).sqrt()
            self.conv.weight.mul_(scale[:, None, None, None])
            self.conv.bias = nn.Parameter(self.bn.bias - self.bn.running_mean * scale)
            self.bn = nn.Identity()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(Conv(1, 8), nn.MaxPool2d(2), Conv(8, 8)), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.body(x).mean((2, 3)))

        def fuse(self):
            for m in self.modules():
                if isinstance(m, Conv) and isinstance(m.bn, nn.BatchNorm2d):
                    m.fuse()
            return self

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (48,), generator=g)
    x = torch.randn(48, 1, 8, 8, generator=g) + y[:, None, None, None]
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def val():
        net = model.eval().fuse()
        return (net(x[:16]).argmax(1) == y[:16]).float().mean().item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=val,
    )


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
            group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
            group["train_mode"] = True

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            c = 1 / group["k"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@fault(
    "evaluation",
    "optimizer.eval() puts the averaged point into the weights, and optimizer.train() is not called afterwards",
    thread="facebookresearch/schedule_free#60",
    check="evaluation_is_pure",
)
def schedule_free():
    train_loader, val_loader = loaders()
    model = mlp(dropout=0.1)
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.3)

    def validate():
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            loss = sum(F.cross_entropy(model(x), y).item() for x, y in val_loader)
        model.train()
        return loss

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=validate,
    )


@fault(
    "evaluation",
    "the few-shot evaluation adapts the live head with its own optimizer, without a copy",
    thread="facebookresearch/higher#55",
    check="evaluation_is_pure",
)
def few_shot_adaptation():
    train_loader, val_loader = loaders()
    backbone, head = nn.Sequential(nn.Linear(12, 24), nn.ReLU()), nn.Linear(24, 4)
    model = nn.Sequential(backbone, head)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def evaluate(steps=3):
        accuracy = []
        for x, y in val_loader:
            support, query = slice(0, 8), slice(8, None)
            inner = torch.optim.SGD(head.parameters(), lr=0.1)
            feats = backbone(x).detach()
            for _ in range(steps):
                inner.zero_grad()
                F.cross_entropy(head(feats[support]), y[support]).backward()
                inner.step()
            accuracy.append((head(feats[query]).argmax(1) == y[query]).float().mean().item())
        optimizer.zero_grad()
        return sum(accuracy) / len(accuracy)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=fit, evaluate=evaluate)
