"""Clips, steps and averages that look odd and are meant."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


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


@right(
    "clips",
    "clip_grad_norm_ with max_norm=inf logs the norm and cuts nothing",
    thread="allenai/OLMo#261",
)
def norm_as_a_metric():
    model = mlp(12, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    metrics = []

    def train(batches):
        metrics.clear()
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), float("inf"))
            metrics.append({"loss": loss.item(), "grad_norm": norm.item()})
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=regression_loader(), fit=train)


class NFNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = F.gelu(self.stem(x))
        x = x + 0.2 * F.gelu(self.conv(x))
        return self.fc(x.mean((2, 3)))


@torch.no_grad()
def adaptive_clip_(parameters, clip_factor=0.01, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        dims = tuple(range(1, p.ndim)) if p.ndim > 1 else None
        weight = torch.linalg.vector_norm(p, dim=dims, keepdim=True).clamp_(min=eps)
        grad = torch.linalg.vector_norm(p.grad, dim=dims, keepdim=True)
        limit = weight * clip_factor
        p.grad.copy_(torch.where(grad > limit, p.grad * (limit / grad.clamp(min=1e-6)), p.grad))


@right(
    "clips",
    "adaptive gradient clipping is used on all layers but the classifier, as the NFNet paper says",
    thread="vballoli/nfnets-pytorch#8",
)
def nfnet_with_agc():
    model = NFNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    clipped = [p for n, p in model.named_parameters() if not n.startswith("fc.")]

    def train(batches):
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            adaptive_clip_(clipped)
            optimizer.step()

    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 5, (64,)))
    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8, shuffle=True), fit=train)


@right(
    "clips",
    "each group is clipped by itself and to a limit of its own, read from the group",
    thread="open-mmlab/mmcv#2563",
)
def limit_for_each_group():
    model = nn.ModuleDict({"text": mlp(12, 16), "fusion": nn.Linear(16, 1)})
    optimizer = torch.optim.AdamW(
        [
            {"params": model["text"].parameters(), "lr": 5e-4, "max_norm": 0.5},
            {"params": model["fusion"].parameters(), "lr": 2e-3, "max_norm": 2.0},
        ]
    )

    def train(batches):
        for x, y in batches:
            loss = F.mse_loss(model["fusion"](model["text"](x)), y)
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                clip_grad_norm_(group["params"], group["max_norm"])
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=regression_loader(), fit=train)


@right(
    "clips",
    "both nets of a GAN are clipped, each before its own step; the generator's backward leaves gradients in the "
    "discriminator that are zeroed unused",
    thread="lucidrains/magvit2-pytorch#10",
)
def gan_with_two_clips():
    gen, disc = mlp(8, 16), mlp(16, 1)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def train(batches):
        for real in batches:
            z = torch.randn(len(real), 8)
            opt_d.zero_grad()
            (F.relu(1 - disc(real)).mean() + F.relu(1 + disc(gen(z).detach())).mean()).backward()
            clip_grad_norm_(disc.parameters(), 0.5)
            opt_d.step()
            opt_g.zero_grad()
            (-disc(gen(z)).mean()).backward()
            clip_grad_norm_(gen.parameters(), 0.5)
            opt_g.step()

    return TrainLoop(
        model={"gen": gen, "disc": disc},
        optimizer=[opt_g, opt_d],
        batches=lambda n: [torch.randn(8, 16) for _ in range(n)],
        fit=train,
    )


class LanguageModel(nn.Module):
    def __init__(self, vocab=20, width=32):
        super().__init__()
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, x, hidden=None):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output), hidden


def text_loader(vocab=20, length=10):
    text = torch.randint(0, vocab, (64, length + 1))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True)


@right(
    "clips",
    "only the recurrent part is clipped, where gradients explode; embedding and decoder are left alone",
    thread="clab/dynet#1374",
)
def clip_the_recurrence():
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()).backward()
            clip_grad_norm_(model.rnn.parameters(), 0.25)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=text_loader(), fit=train)


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.detach().clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError("call first_step and second_step")


@right(
    "clips",
    "SAM clips after both backward passes and moves the weights away and back within each step",
    thread="davda54/sam#64",
)
def sam_with_two_clips():
    model = mlp(12, 4)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)

    def train(batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.second_step(zero_grad=True)

    return TrainLoop(model=model, optimizer=optimizer.base_optimizer, batches=class_loader(), fit=train)


class Lookahead:
    def __init__(self, base_optimizer, alpha=0.5, k=3):
        self.base_optimizer, self.alpha, self.k, self.count = base_optimizer, alpha, k, 0
        self.slow = {}

    @torch.no_grad()
    def sync(self):
        for group in self.base_optimizer.param_groups:
            for p in group["params"]:
                slow = self.slow.setdefault(p, p.detach().clone())
                slow.add_(p - slow, alpha=self.alpha)
                p.copy_(slow)

    def step(self):
        if not self.slow:
            self.slow = {p: p.detach().clone() for g in self.base_optimizer.param_groups for p in g["params"]}
        self.base_optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            self.sync()


@right(
    "clips",
    "Lookahead pulls the fast weights halfway back every third step, to slow weights that move with them",
    thread="mgrankin/over9000#8",
)
def ranger_like():
    model = mlp(12, 1)
    base = torch.optim.RAdam(model.parameters(), lr=3e-3)
    optimizer = Lookahead(base)

    def train(batches):
        for x, y in batches:
            base.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=base, batches=regression_loader(), fit=train)


class ExponentialMovingAverage:
    def __init__(self, parameters, decay=0.95):
        self.parameters = list(parameters)
        self.decay = decay
        self.shadow = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow, self.parameters, strict=True):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for s, p in zip(self.shadow, self.parameters, strict=True):
            value = p.detach().clone()
            p.copy_(s)
            s.copy_(value)


@right(
    "clips",
    "every fourth step the weights are swapped with their average for a validation, and swapped back",
    thread="fadel/pytorch_ema#14",
)
def validation_on_the_average():
    model = mlp(12, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ema = ExponentialMovingAverage(model.parameters())
    x_valid = torch.randn(16, 12)
    y_valid = 4 * x_valid[:, :1] * x_valid[:, 1:2]

    def validate():
        ema.swap()
        model.eval()
        with torch.no_grad():
            error = F.mse_loss(model(x_valid), y_valid).item()
        model.train()
        ema.swap()
        return error

    def train(batches):
        for step, (x, y) in enumerate(batches, 1):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            ema.update()
            if step % 4 == 0:
                validate()

    return TrainLoop(model=model, optimizer=optimizer, batches=regression_loader(), fit=train, evaluate=validate)


@right(
    "clips",
    "a Wasserstein critic is clamped before each of its updates, as the paper's own code has it, and the generator "
    "steps every second batch only",
    thread="martinarjovsky/WassersteinGAN#50",
)
def wasserstein_gan(n_critic=2, clip_value=0.05):
    gen, critic = mlp(8, 16), mlp(16, 1)
    opt_g = torch.optim.RMSprop(gen.parameters(), lr=5e-4)
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=5e-4)

    def train(batches):
        for i, real in enumerate(batches):
            for p in critic.parameters():
                p.data.clamp_(-clip_value, clip_value)
            z = torch.randn(len(real), 8)
            with torch.no_grad():
                fake = gen(z)
            critic.zero_grad()
            (critic(fake).mean() - critic(real).mean()).backward()
            opt_c.step()
            if (i + 1) % n_critic == 0:
                gen.zero_grad()
                (-critic(gen(torch.randn(len(real), 8))).mean()).backward()
                opt_g.step()

    return TrainLoop(
        model={"gen": gen, "critic": critic},
        optimizer=[opt_g, opt_c],
        batches=lambda n: [torch.randn(8, 16) + 1 for _ in range(n)],
        fit=train,
    )


@right(
    "clips",
    "pruned entries are set to zero again after every step, since momentum would bring them back",
    thread="IntelLabs/distiller#63",
)
def finetune_pruned():
    model = mlp(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    masks = {p: (p.abs() > p.abs().quantile(0.5)).float().detach() for p in model.parameters() if p.dim() > 1}
    with torch.no_grad():
        for p, mask in masks.items():
            p.mul_(mask)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for p, mask in masks.items():
                    p.mul_(mask)

    return TrainLoop(model=model, optimizer=optimizer, batches=class_loader(), fit=train)


@right(
    "clips",
    "elastic averaging: after each step two workers and their centre pull each other, and the centre moves",
    thread="mila-iqia/platoon#3",
)
def elastic_workers(alpha=0.2):
    centre = mlp(12, 1)
    workers = [copy.deepcopy(centre) for _ in range(2)]
    optimizers = [torch.optim.SGD(w.parameters(), lr=0.02) for w in workers]

    @torch.no_grad()
    def pull(worker):
        for p, c in zip(worker.parameters(), centre.parameters(), strict=True):
            difference = alpha * (p - c)
            p.sub_(difference)
            c.add_(difference)

    def train(batches):
        for i, (x, y) in enumerate(batches):
            worker, optimizer = workers[i % 2], optimizers[i % 2]
            optimizer.zero_grad()
            F.mse_loss(worker(x), y).backward()
            clip_grad_norm_(worker.parameters(), 5.0)
            optimizer.step()
            pull(worker)

    return TrainLoop(
        model={"first": workers[0], "second": workers[1]},
        optimizer=optimizers,
        batches=regression_loader(),
        fit=train,
    )


@right(
    "clips",
    "a federated client's proximal term pulls it to the global weights, which stand still for the whole round",
    thread="owkin/FLamby#65",
)
def fedprox_client(mu=0.1):
    model = mlp(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    global_weights = [p.detach().clone() for p in model.parameters()]

    def local_round(batches):
        for x, y in batches:
            proximal = sum((p - g).square().sum() for p, g in zip(model.parameters(), global_weights, strict=True))
            loss = F.cross_entropy(model(x), y) + mu / 2 * proximal
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=class_loader(), fit=local_round)


class Streamer:
    """Carries the hidden state from one window of the text to the next, and over calls."""

    def __init__(self):
        self.model = LanguageModel()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.hidden = None

    def carried(self, rows):
        if self.hidden is None or self.hidden[0].shape[1] != rows:
            return None
        return tuple(h.detach() for h in self.hidden)

    def fit(self, windows):
        for x, y in windows:
            self.hidden = self.carried(len(x))
            logits, self.hidden = self.model(x, self.hidden)
            self.optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
            clip_grad_value_(self.model.parameters(), 0.1)
            self.optimizer.step()


@right(
    "clips",
    "truncated backpropagation: the state is carried over windows and calls and detached before each window",
    thread="OpenNMT/OpenNMT-py#1148",
)
def streamed_text():
    streamer = Streamer()
    stream = torch.randint(0, 20, (8, 400))

    def windows(n):
        return [(stream[:, i * 8 : i * 8 + 8], stream[:, i * 8 + 1 : i * 8 + 9]) for i in (j % 49 for j in range(n))]

    return TrainLoop(
        model=streamer.model,
        optimizer=streamer.optimizer,
        batches=windows,
        fit=streamer.fit,
    )


class PoseTrainer:
    def __init__(self, model, stride_apply=1):
        self.model = model
        self.stride_apply = stride_apply
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_batch(self, data, target, apply_gradients):
        loss = F.mse_loss(self.model(data), target) / self.stride_apply
        loss.backward()
        if apply_gradients:
            clip_grad_norm_(self.model.parameters(), 2.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self, batches):
        self.model.train()
        self.optimizer.zero_grad()
        last = len(batches) - 1
        for i, (data, target) in enumerate(batches):
            self.train_batch(data, target, (i + 1) % self.stride_apply == 0 or i == last)


@right(
    "clips",
    "the batch begins with backward() and ends with zero_grad(), once before the loop too; the last window is short "
    "and stepped all the same",
    thread="openpifpaf/openpifpaf#123",
)
def pose_with_stride(accumulate=1):
    trainer = PoseTrainer(mlp(12, 1), stride_apply=accumulate)
    return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batches=regression_loader(), fit=trainer.train)


@right(
    "clips",
    "leftovers of an incomplete window are dropped on purpose: gradients are zeroed at the start of each epoch",
    thread="joeynmt/joeynmt#96",
)
def drop_the_last_window(accumulate=2):
    model = mlp(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_epoch(batches):
        optimizer.zero_grad()
        usable = len(batches) - len(batches) % accumulate
        for i, (x, y) in enumerate(batches, 1):
            if i > usable:
                break
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if i % accumulate == 0:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=class_loader(), fit=train_epoch)


class SparseAutoencoder(nn.Module):
    def __init__(self, inputs=16, features=48):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(inputs))
        self.encoder = nn.Linear(inputs, features)
        self.decoder = nn.Parameter(F.normalize(torch.randn(features, inputs), dim=1))

    def forward(self, x):
        f = F.relu(self.encoder(x - self.bias))
        return f @ self.decoder + self.bias, f

    @torch.no_grad()
    def remove_parallel_gradient(self):
        parallel = (self.decoder.grad * self.decoder).sum(1, keepdim=True)
        self.decoder.grad -= parallel * self.decoder

    @torch.no_grad()
    def normalize_decoder(self):
        self.decoder.copy_(F.normalize(self.decoder, dim=1))


@right(
    "clips",
    "the decoder's rows are kept at norm one: their gradient is projected before the step, and they are after it",
    thread="ai-safety-foundation/sparse_autoencoder#13",
)
def unit_norm_dictionary(l1=1e-2):
    model = SparseAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.999))

    def train(batches):
        for x in batches:
            recon, f = model(x)
            loss = F.mse_loss(recon, x) + l1 * f.abs().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            model.remove_parallel_gradient()
            optimizer.step()
            model.normalize_decoder()

    basis = torch.randn(24, 16)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [torch.relu(torch.randn(16, 24) - 1) @ basis for _ in range(n)],
        fit=train,
    )


@right(
    "clips",
    "weights are averaged beside the training from the fifth step on and never go back into it; update_bn comes last",
    thread="pytorch/pytorch#35032",
)
def averaged_weights(swa_start=5):
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa_model = torch.optim.swa_utils.AveragedModel(model)

    def train(batches):
        model.train()
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step >= swa_start:
                swa_model.update_parameters(model)
        torch.optim.swa_utils.update_bn(batches, swa_model)

    return TrainLoop(model=model, optimizer=optimizer, batches=class_loader(), fit=train)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = mlp(6, 3)
        self.vf = mlp(6, 1)

    def forward(self, obs):
        return torch.distributions.Categorical(logits=self.pi(obs)), self.vf(obs).squeeze(1)


@right(
    "clips",
    "one global norm over actor and critic together, as A2C has it: a large value loss cuts the policy's gradient too",
    thread="DLR-RM/stable-baselines3#466",
)
def advantage_actor_critic(max_grad_norm=0.5):
    policy = ActorCritic()
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)

    def learn(batches):
        for obs, actions, returns in batches:
            dist, values = policy(obs)
            advantages = (returns - values).detach()
            policy_loss = -(advantages * dist.log_prob(actions)).mean()
            value_loss = F.mse_loss(values, returns)
            loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(policy.parameters(), max_grad_norm)
            optimizer.step()

    def rollouts(n):
        return [(torch.randn(16, 6), torch.randint(0, 3, (16,)), 5 * torch.randn(16)) for _ in range(n)]

    return TrainLoop(model=policy, optimizer=optimizer, batches=rollouts, fit=learn)


@right(
    "clips",
    "gradients are unscaled before the clip; a step whose gradients overflow is skipped by the scaler",
    thread="rwth-i6/returnn#1595",
)
def scaled_and_clipped():
    model = mlp(12, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return TrainLoop(model=model, optimizer=optimizer, scaler=scaler, batches=class_loader(), fit=train)


@right(
    "clips",
    "Accelerate: the clip is under sync_gradients, while step() and zero_grad() stand outside and skip by themselves",
    thread="huggingface/diffusers#10553",
)
def accelerated_finetuning(accumulate=1):
    from pytest_trainloop.adapters import fresh_accelerator

    accelerator = fresh_accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    model = mlp(12, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(batches):
        model.train()
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=class_loader(), fit=train)


@right(
    "clips",
    "Lightning clips by value through the trainer; the module's own groups and steps know nothing of it",
    thread="Lightning-AI/pytorch-lightning#4767",
)
def lightning_with_clip_value():
    import lightning

    from pytest_trainloop.adapters import from_lightning

    class LitRegressor(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp(12, 1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.mse_loss(self.net(x), y)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

        def train_dataloader(self):
            return regression_loader()

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return from_lightning(LitRegressor(), trainer)
