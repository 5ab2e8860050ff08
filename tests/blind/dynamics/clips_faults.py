"""Clips that clip nothing or the wrong thing, steps on gradients that are not theirs, weights that are pulled back."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def mlp(inputs, outputs, width=32):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def regression_loader(features=12, scale=4.0, batch_size=8, rows=96):
    x = torch.randn(rows, features)
    y = scale * (x[:, :1] * x[:, 1:2] + x[:, 2:3].sin())
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


def class_loader(features=12, classes=4, batch_size=8, rows=96):
    x = torch.randn(rows, features)
    return DataLoader(TensorDataset(x, x[:, :classes].argmax(1)), batch_size=batch_size, shuffle=True)


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = mlp(12, 32)
        self.depth = nn.Linear(32, 1)
        self.labels = nn.Linear(32, 4)

    def forward(self, x):
        h = self.shared(x).relu()
        return self.depth(h), self.labels(h)


class WeightMethod:
    """Weighs the tasks by the logarithms of their losses."""

    def __init__(self, n_tasks, max_norm=0.1):
        self.weights = torch.full((n_tasks,), 1 / n_tasks)
        self.max_norm = max_norm

    def get_weighted_loss(self, losses):
        return (self.weights * (losses + 1e-8).log()).sum()

    def backward(self, losses, parameters):
        loss = self.get_weighted_loss(losses)
        if self.max_norm > 0:
            clip_grad_norm_(parameters, self.max_norm)
        loss.backward()
        return loss


@fault(
    "clips",
    "clip_grad_norm_ runs before loss.backward(), when the gradients have just been zeroed: nothing is ever clipped",
    thread="Cranial-XIX/FAMO#4",
    check="step_order",
)
def weighted_tasks():
    model = TwoTasks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    method = WeightMethod(2)

    def train(batches):
        for x, depth, labels in batches:
            optimizer.zero_grad()
            d, logits = model(x)
            losses = torch.stack([F.mse_loss(d, depth), F.cross_entropy(logits, labels)])
            method.backward(losses, parameters=list(model.parameters()))
            optimizer.step()

    x = torch.randn(96, 12)
    data = TensorDataset(x, 3 * x[:, :1] * x[:, 1:2], x[:, :4].argmax(1))
    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8, shuffle=True), fit=train)


class Learner:
    def __init__(self, model, lr=0.02, max_norm=0.5):
        self.model = model
        self.max_norm = max_norm
        self.params = model.parameters()
        self.n_params = sum(p.numel() for p in self.params if p.requires_grad)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def fit(self, batches):
        self.model.train()
        for x, y in batches:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            clip_grad_norm_(self.params, self.max_norm)
            self.optimizer.step()


@fault(
    "clips",
    "self.params is a generator that counting the parameters has used up: clip_grad_norm_ gets nothing to clip",
    thread="pytorch/pytorch#148259",
    check="step_order",
)
def learner_with_parameter_count():
    learner = Learner(mlp(12, 1))
    return TrainLoop(model=learner.model, optimizer=learner.optimizer, batches=regression_loader(), fit=learner.fit)


class CharRNN(nn.Module):
    def __init__(self, vocab=20, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.RNN(width, width, batch_first=True)
        self.dense = nn.Linear(width, vocab)

    def forward(self, x):
        return self.dense(self.rnn(self.embed(x))[0])


def grad_clipping(params, theta):
    norm = torch.tensor([0.0])
    for param in params:
        norm += (param.grad.data**2).sum()
    norm = norm.sqrt().item()
    if norm > theta:
        for param in params:
            param.grad.data *= theta / norm


@fault(
    "clips",
    "grad_clipping is handed model.parameters(), a generator: its first loop uses it up, and the second scales nothing",
    thread="ShusenTang/Dive-into-DL-PyTorch#101",
    check="step_order",
)
def char_rnn(clipping_theta=1e-1):
    model = CharRNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = nn.CrossEntropyLoss()

    def train(batches):
        for X, Y in batches:
            output = model(X)
            error = loss(output.reshape(-1, output.shape[-1]), Y.reshape(-1))
            optimizer.zero_grad()
            error.backward()
            grad_clipping(model.parameters(), clipping_theta)
            optimizer.step()

    text = torch.randint(0, 20, (64, 11))
    data = TensorDataset(text[:, :-1], text[:, 1:])
    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8, shuffle=True), fit=train)


@fault(
    "clips",
    "only optimizer.param_groups[0] is clipped; the head, which is in group 1 with the larger rate, is not",
    thread="huggingface/transformers#614",
    check="step_order",
)
def encoder_and_head():
    encoder, head = mlp(12, 32), nn.Linear(32, 1)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    optimizer = torch.optim.AdamW(
        [{"params": encoder.parameters(), "lr": 2e-4}, {"params": head.parameters()}], lr=2e-3
    )

    def train(batches, max_grad_norm=1.0):
        for x, y in batches:
            loss = F.mse_loss(head(encoder(x).relu()), y)
            loss.backward()
            clip_grad_norm_(optimizer.param_groups[0]["params"], max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=regression_loader(), fit=train)


class MakeupGAN:
    def __init__(self):
        self.enc_dec = mlp(16, 16)
        self.discr = mlp(16, 1)
        self.opt_g = torch.optim.Adam(self.enc_dec.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.discr.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.max_norm = 0.1

    def update_discr(self, source, reference):
        fake = self.enc_dec(source).detach()
        real, made = self.discr(reference), self.discr(fake)
        loss = F.softplus(-real).mean() + F.softplus(made).mean()
        self.opt_d.zero_grad()
        loss.backward()
        clip_grad_norm_(self.discr.parameters(), self.max_norm)
        self.opt_d.step()

    def update_gen(self, source):
        fake = self.enc_dec(source)
        loss = F.softplus(-self.discr(fake)).mean() + 10 * F.l1_loss(fake, source)
        self.opt_g.zero_grad()
        loss.backward()
        clip_grad_norm_(self.discr.parameters(), self.max_norm)
        self.opt_g.step()

    def fit(self, batches):
        for source, reference in batches:
            self.update_discr(source, reference)
            self.update_gen(source)


@fault(
    "clips",
    "update_gen clips the discriminator's gradients, which nothing uses there; the generator's are never clipped",
    thread="TencentYoutuResearch/Adv-Makeup#25",
    check="step_order",
)
def makeup_transfer():
    gan = MakeupGAN()
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 16) + 1)
    return TrainLoop(
        model={"enc_dec": gan.enc_dec, "discr": gan.discr},
        optimizer=[gan.opt_g, gan.opt_d],
        batches=DataLoader(data, batch_size=8, shuffle=True),
        fit=gan.fit,
    )


@fault(
    "clips",
    "the sum of gradients is clipped after each micro-batch, and not once before optimizer.step()",
    thread="huggingface/transformers#1563",
    check="accumulation_equivalence",
)
def squad_finetuning(accumulate=4, max_grad_norm=0.1):
    model = mlp(12, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        model.train()
        optimizer.zero_grad()
        for step, (inputs, labels) in enumerate(batches):
            loss = F.cross_entropy(model(inputs), labels)
            if accumulate > 1:
                loss = loss / accumulate
            loss.backward()
            clip_grad_norm_(model.parameters(), max_grad_norm)
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        if len(batches) % accumulate:
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=class_loader(batch_size=4), fit=train)


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.out = nn.Conv2d(width + 3, 2, 1)

    def forward(self, x):
        h = F.relu(self.mid(F.relu(self.down(x))))
        return self.out(torch.cat([self.up(h), x], 1))


@fault(
    "clips",
    "gradients are clipped to 1.0 while they carry the scaler's factor: scaler.unscale_(optimizer) is missing before",
    thread="milesial/Pytorch-UNet#468",
    check="grad_scaler",
)
def unet_with_amp(amp=True, gradient_clipping=1.0):
    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9, foreach=True)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=amp)
    criterion = nn.CrossEntropyLoss()

    def train_model(batches):
        model.train()
        for images, true_masks in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                loss = criterion(model(images).float(), true_masks)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            clip_grad_norm_(model.parameters(), gradient_clipping)
            grad_scaler.step(optimizer)
            grad_scaler.update()

    data = TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(0, 2, (32, 8, 8)))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scaler=grad_scaler,
        batches=DataLoader(data, batch_size=4, shuffle=True),
        fit=train_model,
    )


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def ascend(self):
        grads = [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack(grads).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["e_w"] = p.grad * (group["rho"] / (norm + 1e-12))
                    p.add_(self.state[p]["e_w"])

    @torch.no_grad()
    def descend(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "e_w" in self.state[p]:
                    p.sub_(self.state[p]["e_w"])
        self.base_optimizer.step()

    def step(self, closure):
        with torch.enable_grad():
            closure()
        self.ascend()
        with torch.enable_grad():
            closure()
        self.descend()
        self.zero_grad()


@fault(
    "clips",
    "SAM's second backward adds to the first gradient, which is not zeroed between: each step takes the sum of both",
    thread="rollovd/LookSAM#3",
    check="step_order",
)
def sharpness_aware():
    model = mlp(12, 4)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)

    def train(batches):
        for samples, targets in batches:

            def closure(samples=samples, targets=targets):
                loss = F.cross_entropy(model(samples), targets)
                loss.backward()
                return loss

            optimizer.step(closure)

    return TrainLoop(model=model, optimizer=optimizer, batches=class_loader(), fit=train)


class Lookahead:
    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer = optimizer
        self.k = k
        self.alpha = alpha
        self.counter = 0
        self.slow_weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self):
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.counter += 1
        if self.counter % self.k == 0:
            fast = [p for group in self.optimizer.param_groups for p in group["params"]]
            for p, slow in zip(fast, self.slow_weights, strict=True):
                p.copy_(slow + self.alpha * (p - slow))


@fault(
    "clips",
    "Lookahead's slow weights are never written after the start: every k steps the model is pulled halfway back to its "
    "initial weights",
    thread="PaddlePaddle/PaddleDetection#1262",
    check="every_param_moves",
)
def detector_with_lookahead():
    model = mlp(12, 1)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))

    def train(batches):
        for x, y in batches:
            loss = F.smooth_l1_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer.optimizer, batches=regression_loader(), fit=train)


class EMA:
    def __init__(self, parameters, decay=0.99):
        self.decay = decay
        self.shadow_params = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self, parameters):
        return [torch.lerp(p, s, self.decay) for s, p in zip(self.shadow_params, parameters, strict=True)]

    @torch.no_grad()
    def copy_to(self, parameters):
        for shadow, p in zip(self.shadow_params, parameters, strict=True):
            p.copy_(shadow)


@fault(
    "clips",
    "save_checkpoint copies the average into the model and does not restore it, and what update() "
    "returns is thrown away: every 2 steps training begins again at the initial weights",
    thread="harubaru/waifu-diffusion#31",
    check="every_param_moves",
)
def diffusion_with_ema(save_steps=2):
    unet = mlp(17, 16)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    ema = EMA(unet.parameters())
    saved = {}

    def save_checkpoint(step):
        ema.copy_to(unet.parameters())
        saved["unet"] = copy.deepcopy(unet.state_dict())
        saved["step"] = step

    def train(batches):
        for step, latents in enumerate(batches, 1):
            t = torch.rand(len(latents), 1)
            noise = torch.randn_like(latents)
            noisy = latents * (1 - t) + noise * t
            loss = F.mse_loss(unet(torch.cat([noisy, t], 1)), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(unet.parameters())
            if step % save_steps == 0:
                save_checkpoint(step)

    return TrainLoop(
        model=unet, optimizer=optimizer, batches=lambda n: [torch.randn(8, 16) for _ in range(n)], fit=train
    )


class Seq2SeqAgent:
    """Steps once enough samples have been seen."""

    def __init__(self, model, optim_batch_size=32):
        self.model = model
        self.optim_batch_size = optim_batch_size
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_one_epoch(self, batches):
        self.model.train()
        samples = 0
        for x, y in batches:
            loss = F.cross_entropy(self.model(x), y, reduction="sum") / self.optim_batch_size
            loss.backward()
            samples += len(x)
            if samples >= self.optim_batch_size:
                clip_grad_norm_(self.model.parameters(), 5.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                samples = 0


@fault(
    "clips",
    "an epoch that ends within a window leaves its gradients: the count begins at 0 in the next call, and its first "
    "step takes them with its own full window",
    thread="tomhosking/torchseq#8",
    check="step_order",
)
def question_generation():
    agent = Seq2SeqAgent(mlp(12, 4))
    return TrainLoop(
        model=agent.model,
        optimizer=agent.optimizer,
        batches=class_loader(batch_size=8),
        fit=agent.train_one_epoch,
    )


@fault(
    "clips",
    "the discriminator's gradients are zeroed after its step only: each of its steps also takes what the generator's "
    "backward left in them",
    thread="FoundationVision/OmniTokenizer#15",
    check="step_order",
)
def tokenizer_with_adversary(accumulate=2):
    ae, disc = mlp(16, 16), mlp(16, 1)
    opt_ae = torch.optim.Adam(ae.parameters(), lr=1e-3)
    opt_disc = torch.optim.SGD(disc.parameters(), lr=1e-2)

    def train(batches):
        for i, x in enumerate(batches, 1):
            recon = ae(x)
            loss_g = F.mse_loss(recon, x) - 0.1 * disc(recon).mean()
            (loss_g / accumulate).backward()
            loss_d = F.relu(1 - disc(x)).mean() + F.relu(1 + disc(recon.detach())).mean()
            (loss_d / accumulate).backward()
            if i % accumulate == 0:
                opt_ae.step()
                opt_ae.zero_grad()
                opt_disc.step()
                opt_disc.zero_grad()

    return TrainLoop(
        model={"ae": ae, "disc": disc},
        optimizer=[opt_ae, opt_disc],
        batches=lambda n: [torch.randn(8, 16) for _ in range(n)],
        fit=train,
    )


@fault(
    "clips",
    "accelerator.clip_grad_norm_ is not under sync_gradients: within accumulate() it cuts after each micro-batch",
    thread="huggingface/diffusers#721",
    check="accumulation_equivalence",
)
def train_unconditional(accumulate=2):
    from pytest_trainloop.adapters import fresh_accelerator

    accelerator = fresh_accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    model = mlp(17, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999))
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(batches):
        model.train()
        for clean in batches:
            t = torch.linspace(0.05, 0.95, len(clean)).unsqueeze(1)
            noisy = (1 - t) * clean + t * clean.flip(1)
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(torch.cat([noisy, t], 1)), clean)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=lambda n: [3 * torch.randn(8, 16) for _ in range(n)], fit=train
    )
