"""Loops that save and load rightly, and look as if something were missing."""

from __future__ import annotations

import copy
import io
import itertools
import math
import random
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def classified(batches=8, rows=8, features=12, classes=4, seed=20):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=g)
    out = []
    for _ in range(batches):
        y = torch.randint(classes, (rows,), generator=g)
        out.append((centres[y] + 0.7 * torch.randn(rows, features, generator=g), y))
    return out


def vectors(batches=8, rows=8, size=16, seed=21):
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(rows, size, generator=g) for _ in range(batches)]


def tokens(batches=8, rows=4, length=10, vocab=24, seed=22):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (rows, length), generator=g) for _ in range(batches)]


def mlp(features=12, hidden=24, classes=4):
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


@right(
    "checkpoints",
    "weights, optimizer, schedule, scaler, counters and all generators are in the file",
    thread="huggingface/transformers#11663",
)
def everything_in_the_file():
    class Trainer:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
            self.scheduler = LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / 5))
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
            self.global_step = 0

        def train(self, batches):
            self.model.train()
            for x, y in batches:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(self.model(x + 0.01 * float(np.random.rand())), y)
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                before = self.scaler.get_scale()
                self.scaler.update()
                if self.scaler.get_scale() >= before:
                    self.scheduler.step()
                self.global_step += 1

        def parts(self):
            return {k: getattr(self, k) for k in ("model", "optimizer", "scheduler", "scaler")}

        def save_checkpoint(self, path):
            state = {k: part.state_dict() for k, part in self.parts().items()}
            state["global_step"] = self.global_step
            state["rng"] = {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "cpu": torch.get_rng_state(),
            }
            torch.save(state, path)

        def load_checkpoint(self, path):
            state = torch.load(path, weights_only=False)
            for k, part in self.parts().items():
                part.load_state_dict(state[k])
            self.global_step = state["global_step"]
            random.setstate(state["rng"]["python"])
            np.random.set_state(state["rng"]["numpy"])
            torch.set_rng_state(state["rng"]["cpu"])

    t = Trainer()
    return TrainLoop(
        model=t.model,
        optimizer=t.optimizer,
        scheduler=t.scheduler,
        scaler=t.scaler,
        batches=classified(),
        fit=t.train,
        save=t.save_checkpoint,
        load=t.load_checkpoint,
    )


@right(
    "checkpoints",
    "a warm start for fine-tuning: weights only, optimizer and schedule are begun anew and declared so",
    thread="EleutherAI/gpt-neox#429",
)
def warm_start():
    model = nn.Sequential(nn.Embedding(24, 16), nn.Flatten(), nn.Linear(160, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))

    def train(batches):
        model.train()
        for ids in batches:
            loss = F.cross_entropy(model(ids), ids.sum(1) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=tokens(),
        fit=train,
        save=lambda path: torch.save(model.state_dict(), path),
        load=lambda path: model.load_state_dict(torch.load(path)),
        renews=("optimizer", "scheduler"),
    )


@right(
    "checkpoints",
    "the optimizer is plain SGD: it has no state, and saving it would add nothing",
    thread="NVlabs/stylegan2-ada-pytorch#108",
)
def plain_sgd():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)

    def epoch(batches):
        for img, label in batches:
            sgd.zero_grad()
            F.cross_entropy(net(img), label).backward()
            sgd.step()

    g = torch.Generator().manual_seed(23)
    data = [(torch.rand(4, 1, 6, 6, generator=g), torch.randint(5, (4,), generator=g)) for _ in range(6)]
    return TrainLoop(
        model=net,
        optimizer=sgd,
        batches=data,
        fit=epoch,
        save=lambda path: torch.save(net.state_dict(), path),
        load=lambda path: net.load_state_dict(torch.load(path)),
    )


class Block(nn.Module):
    """Causal attention whose mask and rotary frequencies are computed, not trained."""

    def __init__(self, width=16, length=16):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).bool(), persistent=False)
        inv = 1.0 / 100 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("angles", torch.outer(torch.arange(length).float(), inv), persistent=False)

    def turn(self, x):
        a = self.angles[: x.shape[1]]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * a.cos() - odd * a.sin(), even * a.sin() + odd * a.cos()), -1).flatten(-2)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        att = self.turn(q) @ self.turn(k).transpose(1, 2) / q.shape[-1] ** 0.5
        att = att.masked_fill(~self.mask[: x.shape[1], : x.shape[1]], float("-inf")).softmax(-1)
        return x + self.out(att @ v)


class GPT(nn.Module):
    def __init__(self, vocab=24, width=16, dropout=0.0):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.drop = nn.Dropout(dropout)
        self.block = Block(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        logits = self.lm_head(self.block(self.drop(self.wte(ids[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@right(
    "checkpoints",
    "the learning rate is a function of iter_num, which is saved; no scheduler object exists",
    thread="karpathy/nanoGPT#467",
)
def nano_gpt():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    run = {"iter_num": 0}

    def get_lr(it):
        if it < 4:
            return 1e-2 * (it + 1) / 4
        return 1e-3 + 0.5 * (1 + math.cos(math.pi * min(1.0, (it - 4) / 60))) * 9e-3

    def train(batches):
        for ids in batches:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(run["iter_num"])
            loss = model(ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run["iter_num"] += 1

    def load(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        run["iter_num"] = checkpoint["iter_num"]

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=tokens(),
        fit=train,
        save=lambda path: torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": run["iter_num"]}, path
        ),
        load=load,
    )


@right(
    "checkpoints",
    "the scheduler is built anew with last_epoch and the schedule is a closed form of the step",
    thread="vllm-project/speculators#900",
)
def scheduler_from_last_epoch():
    class Run:
        def __init__(self):
            self.model = mlp()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.global_step = 0
            self.scheduler = self.schedule()

        def schedule(self):
            return LambdaLR(self.optimizer, lambda s: max(0.05, 1 - s / 40), last_epoch=self.global_step - 1)

        def fit(self, batches):
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.scheduler.step()
                self.global_step += 1

        def save(self, path):
            torch.save(
                {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "global_step": self.global_step,
                },
                path,
            )

        def load(self, path):
            saved = torch.load(path)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.global_step = saved["global_step"]
            self.scheduler = self.schedule()

    r = Run()
    return TrainLoop(model=r.model, optimizer=r.optimizer, batches=classified(), fit=r.fit, save=r.save, load=r.load)


@right(
    "checkpoints",
    "the EMA and its counter of updates are saved beside the model",
    thread="Benzoin96485/Enerzyme#36",
)
def ema_and_counter():
    model = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.BatchNorm1d(24), nn.Linear(24, 1))
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    counter = {"updates": 0}

    def fit(batches):
        model.train()
        for x in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
            optimizer.step()
            counter["updates"] += 1
            d = min(0.99, (1 + counter["updates"]) / (10 + counter["updates"]))
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.parameters(), strict=True):
                    e.lerp_(p, 1 - d)
                for e, b in zip(ema.buffers(), model.buffers(), strict=True):
                    e.copy_(b)

    def save():
        return {
            "state_dict": model.state_dict(),
            "ema_state_dict": ema.state_dict(),
            "optimizer": optimizer.state_dict(),
            "updates": counter["updates"],
        }

    def load(state):
        model.load_state_dict(state["state_dict"])
        ema.load_state_dict(state["ema_state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        counter["updates"] = state["updates"]

    return TrainLoop(
        model={"model": model, "ema": ema}, optimizer=optimizer, batches=vectors(), fit=fit, save=save, load=load
    )


@right(
    "checkpoints",
    "the non-persistent buffers are constants (mask, rotary angles), computed in __init__",
    thread="EleutherAI/gpt-neox#1168",
)
def rotary_tables():
    model = nn.ModuleDict({"a": Block(), "b": Block(), "head": nn.Linear(16, 16)})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x in batches:
            loss = F.mse_loss(model["head"](model["b"](model["a"](x[:, :-1]))), x[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def save(path):
        torch.save((model.state_dict(), optimizer.state_dict()), path)

    def load(path):
        weights, state = torch.load(path)
        unexpected = model.load_state_dict(weights, strict=False).unexpected_keys
        assert not unexpected, unexpected
        optimizer.load_state_dict(state)

    g = torch.Generator().manual_seed(24)
    data = [torch.randn(4, 8, 16, generator=g) for _ in range(6)]
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit, save=save, load=load)


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def pretrained(*sizes):
    """What from_pretrained gives: the same weights each time."""
    g = torch.Generator().manual_seed(sum(sizes))
    layers = []
    for a, b in itertools.pairwise(sizes):
        layer = nn.Linear(a, b)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(b, a, generator=g) / a**0.5)
            layer.bias.zero_()
        layers.append(layer)
    return layers


@right(
    "checkpoints",
    "strict=False: only adapters and head are saved, the frozen base comes from the pretrained weights",
    thread="huggingface/sentence-transformers#3980",
)
def adapters_and_head():
    first, second = pretrained(12, 16, 16)
    model = nn.Sequential(LoRALinear(first), nn.ReLU(), LoRALinear(second), nn.ReLU())
    model.append(nn.Linear(16, 4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def save(path):
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        torch.save(
            {
                "adapter": {k: v for k, v in model.state_dict().items() if k in trained},
                "optimizer": optimizer.state_dict(),
            },
            path,
        )

    def load(path):
        ckpt = torch.load(path)
        result = model.load_state_dict(ckpt["adapter"], strict=False)
        assert not result.unexpected_keys
        assert all(".base." in k for k in result.missing_keys)
        optimizer.load_state_dict(ckpt["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        frozen=("0.base", "2.base"),
        batches=classified(),
        fit=fit,
        save=save,
        load=load,
    )


@right(
    "checkpoints",
    "the teacher is frozen and pretrained: it is left out of the checkpoint on purpose",
    thread="lightly-ai/lightly-train#108",
)
def distillation_without_teacher():
    a, b = pretrained(16, 24, 8)
    teacher = nn.Sequential(a, nn.ReLU(), b).requires_grad_(False).eval()

    class Distill(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = teacher
            self.student = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8))

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return F.mse_loss(self.student(x), target)

    method = Distill()
    optimizer = torch.optim.AdamW(method.student.parameters(), lr=5e-3)

    def fit(batches):
        for x in batches:
            loss = method(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def save():
        weights = {k: v for k, v in method.state_dict().items() if not k.startswith("teacher.")}
        return {"state_dict": weights, "optimizer": optimizer.state_dict()}

    def load(ckpt):
        incompatible = method.load_state_dict(ckpt["state_dict"], strict=False)
        if any(not k.startswith("teacher.") for k in incompatible.missing_keys):
            raise RuntimeError(incompatible.missing_keys)
        optimizer.load_state_dict(ckpt["optimizer"])

    return TrainLoop(
        model=method,
        optimizer=optimizer,
        frozen=("teacher.",),
        batches=vectors(),
        fit=fit,
        save=save,
        load=load,
    )


@right(
    "checkpoints",
    "the prefix _orig_mod. or module. is stripped before loading, strictly",
    thread="karpathy/nanoGPT#325",
)
def prefix_stripped():
    net = mlp()
    wrapped = nn.DataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()

    def load(path):
        checkpoint = torch.load(path)
        state_dict = checkpoint["model"]
        for prefix in ("_orig_mod.", "module."):
            for k in list(state_dict):
                if k.startswith(prefix):
                    state_dict[k[len(prefix) :]] = state_dict.pop(k)
        net.load_state_dict(state_dict)
        optimizer.load_state_dict(checkpoint["optimizer"])

    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batches=classified(),
        fit=fit,
        save=lambda path: torch.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@right(
    "checkpoints",
    "tied weights are saved once; the copy under the other name is left out and comes back by the tie",
    thread="huggingface/transformers#11682",
)
def tied_saved_once():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def fit(batches):
        for ids in batches:
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()

    def save(path):
        seen, weights = set(), {}
        for name, value in model.state_dict().items():
            if value.data_ptr() not in seen:
                seen.add(value.data_ptr())
                weights[name] = value
        torch.save({"weights": weights, "optimizer": optimizer.state_dict()}, path)

    def load(path):
        ckpt = torch.load(path)
        missing, unexpected = model.load_state_dict(ckpt["weights"], strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise KeyError(missing, unexpected)
        optimizer.load_state_dict(ckpt["optimizer"])

    return TrainLoop(model=model, optimizer=optimizer, batches=tokens(), fit=fit, save=save, load=load)


@right(
    "checkpoints",
    "best weights are deep copies kept for the end; a resume goes on from the last ones",
    thread="pytorch/tutorials#188",
)
def best_and_last():
    class EarlyStopping:
        def __init__(self):
            self.best, self.wait, self.weights = float("inf"), 0, None

        def update(self, value, model):
            if value < self.best:
                self.best, self.wait = value, 0
                self.weights = copy.deepcopy(model.state_dict())
            else:
                self.wait += 1

    model, stopper = mlp(), EarlyStopping()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    held_out = classified(batches=1, seed=99)[0]

    @torch.no_grad()
    def validate():
        model.eval()
        value = F.cross_entropy(model(held_out[0]), held_out[1]).item()
        model.train()
        return value

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        stopper.update(validate(), model)

    def save():
        return copy.deepcopy({"last": model.state_dict(), "opt": optimizer.state_dict(), "stopper": vars(stopper)})

    def load(state):
        model.load_state_dict(state["last"])
        optimizer.load_state_dict(state["opt"])
        vars(stopper).update(copy.deepcopy(state["stopper"]))

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(),
        fit=fit,
        evaluate=validate,
        save=save,
        load=load,
    )


@right(
    "checkpoints",
    "dropout draws from the global generator, which is not in the file, as in nanoGPT",
    thread="karpathy/nanoGPT train.py",
)
def dropout_without_generator_state():
    model = GPT(dropout=0.1)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=5e-3)

    def fit(batches):
        model.train()
        for ids in batches:
            optimizer.zero_grad(set_to_none=True)
            model(ids).backward()
            optimizer.step()

    def load(path):
        ckpt = torch.load(path)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=tokens(),
        fit=fit,
        save=lambda path: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
        renews=("rng",),
    )


@right(
    "checkpoints",
    "a GAN whose two networks and two optimizers are saved in a loop over names",
    thread="junyanz/pytorch-CycleGAN-and-pix2pix#1380",
)
def gan_by_names():
    class Pix2Pix:
        names = ("netG", "netD", "optG", "optD")

        def __init__(self):
            self.netG = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.BatchNorm1d(24), nn.Linear(24, 16))
            self.netD = nn.Sequential(nn.Linear(32, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
            self.optG = torch.optim.Adam(self.netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
            self.optD = torch.optim.Adam(self.netD.parameters(), lr=2e-3, betas=(0.5, 0.999))

        def optimize_parameters(self, a, b):
            fake = self.netG(a)
            self.netD.requires_grad_(True)
            self.optD.zero_grad()
            real_out, fake_out = self.netD(torch.cat([a, b], 1)), self.netD(torch.cat([a, fake.detach()], 1))
            (F.softplus(-real_out) + F.softplus(fake_out)).mean().backward()
            self.optD.step()
            self.netD.requires_grad_(False)
            self.optG.zero_grad()
            (F.softplus(-self.netD(torch.cat([a, fake], 1))).mean() + 10 * F.l1_loss(fake, b)).backward()
            self.optG.step()

        def fit(self, batches):
            for x in batches:
                self.optimize_parameters(x, 1 - x)

        def save(self, folder):
            for name in self.names:
                torch.save(getattr(self, name).state_dict(), folder / f"latest_{name}.pth")

        def load(self, folder):
            for name in self.names:
                getattr(self, name).load_state_dict(torch.load(folder / f"latest_{name}.pth"))

    m = Pix2Pix()
    return TrainLoop(
        model={"G": m.netG, "D": m.netD},
        optimizer=[m.optG, m.optD],
        batches=vectors(),
        fit=m.fit,
        save=m.save,
        load=m.load,
    )


@right(
    "checkpoints",
    "target network, replay memory, its generator and the step of the exploration are in the checkpoint",
    thread="Curt-Park/rainbow-is-all-you-need#34",
)
def dqn_with_memory():
    def net():
        return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))

    q, target = net(), net()
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
    rng = random.Random(0)
    run = {"steps": 0, "memory": []}

    def fit(batches):
        for obs, reward, after in batches:
            run["memory"] += list(zip(obs, reward, after, strict=True))
            run["memory"] = run["memory"][-64:]
            o, r, n = map(torch.stack, zip(*rng.choices(run["memory"], k=16), strict=True))
            epsilon = max(0.05, 1 - run["steps"] / 20)
            action = q(o).argmax(1)
            if rng.random() < epsilon:
                action = torch.tensor([rng.randrange(3) for _ in range(16)])
            with torch.no_grad():
                goal = r + 0.9 * target(n).max(1).values
            optimizer.zero_grad()
            F.smooth_l1_loss(q(o).gather(1, action[:, None]).squeeze(1), goal).backward()
            optimizer.step()
            run["steps"] += 1
            if run["steps"] % 4 == 0:
                target.load_state_dict(q.state_dict())

    def save(path):
        torch.save(
            {
                "q": q.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "run": run,
                "rng": rng.getstate(),
            },
            path,
        )

    def load(path):
        saved = torch.load(path, weights_only=False)
        q.load_state_dict(saved["q"])
        target.load_state_dict(saved["target"])
        optimizer.load_state_dict(saved["optimizer"])
        run.update(saved["run"])
        rng.setstate(saved["rng"])

    g = torch.Generator().manual_seed(25)
    data = [
        (torch.randn(8, 6, generator=g), torch.randn(8, generator=g), torch.randn(8, 6, generator=g)) for _ in range(8)
    ]
    return TrainLoop(model={"q": q, "target": target}, optimizer=optimizer, batches=data, fit=fit, save=save, load=load)


@right(
    "checkpoints",
    "MoCo: queue and pointer are persistent buffers, the key encoder is part of the module",
    thread="facebookresearch/vissl#440",
)
def moco_in_buffers():
    class MoCo(nn.Module):
        def __init__(self, dim=8, size=32):
            super().__init__()
            self.q = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, dim))
            self.k = copy.deepcopy(self.q).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        def forward(self, a, b):
            q = F.normalize(self.q(a), dim=1)
            with torch.no_grad():
                for p, m in zip(self.q.parameters(), self.k.parameters(), strict=True):
                    m.mul_(0.9).add_(p, alpha=0.1)
                k = F.normalize(self.k(b), dim=1)
            pos = (q * k).sum(1, keepdim=True)
            loss = F.cross_entropy(torch.cat([pos, q @ self.queue.clone()], 1) / 0.2, torch.zeros(len(a)).long())
            at = int(self.ptr)
            self.queue[:, at : at + len(k)] = k.T
            self.ptr[0] = (at + len(k)) % self.queue.shape[1]
            return loss

    model = MoCo()
    optimizer = torch.optim.SGD(model.q.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def fit(batches):
        for x in batches:
            optimizer.zero_grad()
            model(x, x.flip(1)).backward()
            optimizer.step()

    def load(state):
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=vectors(),
        fit=fit,
        save=lambda: {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
        load=load,
    )


@right(
    "checkpoints",
    "what is accumulated at the end of fit is discarded: a checkpoint never falls into a window",
    thread="the-database/traiNNer-redux#96",
)
def leftovers_discarded():
    accumulate = 2
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def fit(batches):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()

    def load(state):
        model.load_state_dict(state["net"])
        optimizer.load_state_dict(state["opt"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(batches=12),
        fit=fit,
        save=lambda: {"net": model.state_dict(), "opt": optimizer.state_dict()},
        load=load,
    )


@right(
    "checkpoints",
    "gradients of an unfinished window are saved with the micro-step and put back",
    thread="Nerogar/OneTrainer#1465",
)
def gradients_in_the_file():
    model = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    progress = {"micro": 0}

    def fit(batches):
        for x in batches:
            (F.mse_loss(model(0.5 * x), x) / 4).backward()
            progress["micro"] += 1
            if progress["micro"] % 4 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def save(path):
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        torch.save(
            {"model": model.state_dict(), "opt": optimizer.state_dict(), "grads": grads, "progress": progress}, path
        )

    def load(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["opt"])
        progress.update(saved["progress"])
        for n, p in model.named_parameters():
            p.grad = saved["grads"].get(n)

    return TrainLoop(model=model, optimizer=optimizer, batches=vectors(batches=12), fit=fit, save=save, load=load)


@right(
    "checkpoints",
    "Lookahead keeps the slow weights in the state of the optimizer",
    thread="mgrankin/over9000#8",
)
def lookahead_in_state():
    class LookaheadAdam(torch.optim.Adam):
        k, alpha = 3, 0.5

        @torch.no_grad()
        def step(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"]]
            first = {p: p.detach().clone() for p in params if "slow" not in self.state[p]}
            loss = super().step(closure)
            for p in params:
                slow = self.state[p].setdefault("slow", first.get(p))
                if int(self.state[p]["step"]) % self.k == 0:
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)
            return loss

    model = mlp()
    optimizer = LookaheadAdam(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def load(path):
        saved = torch.load(path)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(),
        fit=fit,
        save=lambda path: torch.save([model.state_dict(), optimizer.state_dict()], path),
        load=load,
    )


@right(
    "checkpoints",
    "losses, timers and throughput are for the log only and start empty after a resume",
    thread="tensorpack/tensorpack#364",
)
def log_starts_empty():
    class Meters:
        def __init__(self):
            self.losses, self.started, self.seen = [], time.monotonic(), 0

        def add(self, loss, rows):
            self.losses.append(loss)
            self.seen += rows

        def line(self):
            rate = self.seen / (time.monotonic() - self.started)
            return f"loss {sum(self.losses[-10:]) / max(1, len(self.losses[-10:])):.3f}, {rate:.0f} rows/s"

    class Trainer:
        def __init__(self):
            self.model = mlp()
            self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=5e-3)
            self.meters = Meters()
            self.lines = []

        def fit(self, batches):
            for x, y in batches:
                loss = F.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.meters.add(loss.item(), len(x))
            self.lines.append(self.meters.line())

        def state_dict(self):
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

        def load_state_dict(self, state):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    t = Trainer()
    return TrainLoop(
        model=t.model,
        optimizer=t.optimizer,
        batches=classified(),
        fit=t.fit,
        save=t.state_dict,
        load=t.load_state_dict,
    )


@right(
    "checkpoints",
    "after the optimizer is loaded, lr and weight decay of the config are set: the same ones as before",
    thread="pytorch/examples#816",
)
def lr_from_the_config():
    @dataclass
    class Config:
        lr: float = 0.05
        momentum: float = 0.9
        weight_decay: float = 1e-4

    cfg = Config()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), **asdict(cfg))

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def load(path):
        ckpt = torch.load(path)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        for group in optimizer.param_groups:
            group.update(asdict(cfg))

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(),
        fit=fit,
        save=lambda path: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@right(
    "checkpoints",
    "the optimizer's state is stored under names of parameters, so that the order does not matter",
    thread="piergiaj/pytorch-i3d#38",
)
def state_by_name():
    model = nn.ModuleDict({"stem": nn.Linear(12, 16), "mid": nn.Linear(16, 16), "head": nn.Linear(16, 4)})
    named = dict(model.named_parameters())
    optimizer = torch.optim.Adam([named[n] for n in reversed(named)], lr=5e-3)

    def fit(batches):
        for x, y in batches:
            h = model["mid"](model["stem"](x).relu()).relu()
            optimizer.zero_grad()
            F.cross_entropy(model["head"](h), y).backward()
            optimizer.step()

    def save(path):
        moments = {
            n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in named.items() if p in optimizer.state
        }
        torch.save({"weights": model.state_dict(), "moments": moments}, path)

    def load(path):
        saved = torch.load(path)
        model.load_state_dict(saved["weights"])
        optimizer.state.clear()
        for n, state in saved["moments"].items():
            optimizer.state[named[n]] = state

    return TrainLoop(model=model, optimizer=optimizer, batches=classified(), fit=fit, save=save, load=load)


@right(
    "checkpoints",
    "accelerate writes a folder: save_state and load_state, with the counter registered",
    thread="huggingface/accelerate#290",
)
def accelerate_state():
    from pytest_trainloop.adapters import fresh_accelerator

    accelerator = fresh_accelerator(cpu=True)

    class Progress:
        def __init__(self):
            self.completed_steps = 0

        def state_dict(self):
            return {"completed_steps": self.completed_steps}

        def load_state_dict(self, state):
            self.completed_steps = state["completed_steps"]

    progress = Progress()
    net = mlp()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    schedule = LambdaLR(opt, lambda s: min(1.0, (s + 1) / 6))
    model, optimizer, scheduler = accelerator.prepare(net, opt, schedule)
    accelerator.register_for_checkpointing(progress)

    def fit(batches):
        model.train()
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.completed_steps += 1

    return TrainLoop(
        model=net,
        optimizer=opt,
        scheduler=schedule,
        batches=classified(),
        fit=fit,
        save=lambda output_dir: accelerator.save_state(str(output_dir)),
        load=lambda output_dir: accelerator.load_state(str(output_dir)),
    )


@right(
    "checkpoints",
    "a transformers model: save_pretrained beside the optimizer's file, reloaded into the same object",
    thread="huggingface/transformers#11682",
)
def pretrained_folder():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(batches):
        model.train()
        for batch in batches:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def save(folder):
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def load(folder):
        saved = BertForSequenceClassification.from_pretrained(folder)
        model.load_state_dict(saved.state_dict())
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))

    data = [{"input_ids": ids, "labels": ids[:, 1] % 3} for ids in tokens(batches=6)]
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit, save=save, load=load)


class ScheduleFreeSGD(torch.optim.Optimizer):
    """The weights are y in training; z and the average x are in the state, and eval() shows x."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _swap(self, train):
        for g in self.param_groups:
            if g["train_mode"] != train:
                for p in g["params"]:
                    if "z" in self.state[p]:
                        weight = 1 - g["beta"] if train else 1 - 1 / g["beta"]
                        p.lerp_(self.state[p]["z"], weight)
                g["train_mode"] = train

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            c = 1 / (g["k"] + 1)
            for p in g["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                z = state["z"]
                p.lerp_(z, c)
                p.add_(p.grad, alpha=g["lr"] * (g["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=g["lr"])
            g["k"] += 1


@right(
    "checkpoints",
    "schedule-free: saved in training mode, the average is computed from z in the optimizer's state",
    thread="facebookresearch/schedule_free#22",
)
def schedule_free():
    model = mlp()
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.1)
    held_out = classified(batches=1, seed=98)[0]

    def fit(batches):
        model.train()
        optimizer.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    @torch.no_grad()
    def evaluate():
        model.eval()
        optimizer.eval()
        value = F.cross_entropy(model(held_out[0]), held_out[1]).item()
        model.train()
        optimizer.train()
        return value

    def load(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(),
        fit=fit,
        evaluate=evaluate,
        save=lambda path: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@right(
    "checkpoints",
    "L-BFGS keeps its history in the state of the first parameter, which state_dict carries",
    thread="pytorch/pytorch#34564",
)
def lbfgs_history():
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=5)

    def fit(batches):
        for x in batches:

            def closure(x=x):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x).squeeze(1), x.prod(1) + x.sum(1))
                loss.backward()
                return loss

            optimizer.step(closure)

    def save():
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()

    def load(content):
        state = torch.load(io.BytesIO(content))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return TrainLoop(model=model, optimizer=optimizer, batches=vectors(), fit=fit, save=save, load=load)


@right(
    "checkpoints",
    "the averaged model is saved whole, n_averaged included",
    thread="Lightning-AI/pytorch-lightning#9938",
)
def averaged_model_whole():
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=30)
    everything = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler}

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)

    def load(path):
        for name, state in torch.load(path).items():
            everything[name].load_state_dict(state)

    return TrainLoop(
        model={"model": model, "average": average},
        optimizer=optimizer,
        scheduler=scheduler,
        batches=classified(),
        fit=fit,
        save=lambda path: torch.save({k: v.state_dict() for k, v in everything.items()}, path),
        load=load,
    )


@right(
    "checkpoints",
    "the step of the KL weight is a buffer of the model and travels with its weights",
    thread="JiahuiYu/generative_inpainting#466",
)
def step_in_a_buffer():
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(16, 8), nn.Linear(4, 16)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x, eps):
            mu, logvar = self.enc(x).chunk(2, 1)
            beta = torch.clamp(self.steps / 20, max=1.0)
            if self.training:
                self.steps += 1
            kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar).sum(1).mean()
            return F.mse_loss(self.dec(mu + eps * (logvar / 2).exp()), x) + beta * 0.1 * kl

    model = VAE()
    optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)

    def fit(batches):
        model.train()
        for x, eps in batches:
            optimizer.zero_grad()
            model(x, eps).backward()
            optimizer.step()

    def load(path):
        a, b = torch.load(path)
        model.load_state_dict(a)
        optimizer.load_state_dict(b)

    g = torch.Generator().manual_seed(26)
    data = [(x, torch.randn(len(x), 4, generator=g)) for x in vectors()]
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=data,
        fit=fit,
        save=lambda path: torch.save((model.state_dict(), optimizer.state_dict()), path),
        load=load,
    )


@right(
    "checkpoints",
    "weights in bfloat16; the float32 masters are saved and the low-precision ones follow from them",
    thread="TensorAuto/OpenTau#185",
)
def masters_saved():
    model = mlp().to(torch.bfloat16)
    masters = [p.detach().float().clone().requires_grad_(True) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=5e-3)

    @torch.no_grad()
    def publish():
        for p, m in zip(model.parameters(), masters, strict=True):
            p.copy_(m)

    def fit(batches):
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            for p, m in zip(model.parameters(), masters, strict=True):
                m.grad = p.grad.float()
            optimizer.step()
            publish()

    def load(path):
        saved = torch.load(path)
        with torch.no_grad():
            for m, s in zip(masters, saved["masters"], strict=True):
                m.copy_(s)
        optimizer.load_state_dict(saved["optimizer"])
        publish()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(),
        fit=fit,
        save=lambda path: torch.save(
            {"masters": [m.detach() for m in masters], "optimizer": optimizer.state_dict()}, path
        ),
        load=load,
    )


@right(
    "checkpoints",
    "ReduceLROnPlateau is saved with best and num_bad_epochs",
    thread="KaiyangZhou/deep-person-reid#270",
)
def plateau_saved():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.3)

    def fit(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(loss.item())

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=classified(),
        fit=fit,
        save=lambda: {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        load=load,
    )


@right(
    "checkpoints",
    "MAML: the inner steps are functional and begin anew with each task; only the outer Adam has state",
    thread="AntreasAntoniou/HowToTrainYourMAMLPytorch#31",
)
def maml_outer_state():
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    meta = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for task in batches:
            fast = dict(model.named_parameters())
            for _ in range(2):
                support = F.mse_loss(functional_call(model, fast, task["xs"]), task["ys"])
                grads = torch.autograd.grad(support, list(fast.values()), create_graph=True)
                fast = {n: p - 0.05 * g for (n, p), g in zip(fast.items(), grads, strict=True)}
            meta.zero_grad()
            F.mse_loss(functional_call(model, fast, task["xq"]), task["yq"]).backward()
            meta.step()

    def load(path):
        saved = torch.load(path)
        model.load_state_dict(saved["network"])
        meta.load_state_dict(saved["optimizer"])

    g = torch.Generator().manual_seed(27)
    tasks = []
    for _ in range(8):
        phase = 3 * torch.rand(1, generator=g)
        xs, xq = torch.randn(8, 1, generator=g), torch.randn(8, 1, generator=g)
        tasks.append({"xs": xs, "ys": (xs + phase).sin(), "xq": xq, "yq": (xq + phase).sin()})
    return TrainLoop(
        model=model,
        optimizer=meta,
        batches=tasks,
        fit=fit,
        save=lambda path: torch.save({"network": model.state_dict(), "optimizer": meta.state_dict()}, path),
        load=load,
    )


@right(
    "checkpoints",
    "PPO: the rollout buffer is filled and emptied within one update, there is nothing of it to save",
    thread="DLR-RM/stable-baselines3#29",
)
def ppo_without_buffer():
    policy = nn.ModuleDict({"pi": nn.Linear(6, 3), "v": nn.Linear(6, 1)})
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
    buffer = []

    def update(roll):
        buffer.append(roll)
        obs, action, reward = (torch.cat(c) for c in zip(*buffer, strict=True))
        with torch.no_grad():
            old = F.log_softmax(policy["pi"](obs), -1).gather(1, action[:, None])
            adv = reward - policy["v"](obs).squeeze(1)
        for _ in range(3):
            ratio = (F.log_softmax(policy["pi"](obs), -1).gather(1, action[:, None]) - old).exp().squeeze(1)
            gain = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            optimizer.zero_grad()
            (F.mse_loss(policy["v"](obs).squeeze(1), reward) - gain).backward()
            optimizer.step()
        buffer.clear()

    def fit(batches):
        for roll in batches:
            update(roll)

    def load(path):
        data = torch.load(path)
        policy.load_state_dict(data["policy"])
        optimizer.load_state_dict(data["policy.optimizer"])

    g = torch.Generator().manual_seed(28)
    data = [
        (torch.randn(12, 6, generator=g), torch.randint(3, (12,), generator=g), torch.randn(12, generator=g))
        for _ in range(8)
    ]
    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batches=data,
        fit=fit,
        save=lambda path: torch.save({"policy": policy.state_dict(), "policy.optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@right(
    "checkpoints",
    "save swaps the EMA in to export it, and the raw weights back from clones",
    thread="harubaru/waifu-diffusion#31",
)
def export_and_back():
    unet = nn.Sequential(nn.Linear(17, 32), nn.SiLU(), nn.Linear(32, 16))
    shadow = [p.detach().clone() for p in unet.parameters()]
    optimizer = torch.optim.AdamW(unet.parameters(), lr=4e-3)

    def fit(batches):
        for x, noise, t in batches:
            optimizer.zero_grad()
            F.mse_loss(unet(torch.cat([x * (1 - t) + noise * t, t], 1)), noise).backward()
            optimizer.step()
            with torch.no_grad():
                for s, p in zip(shadow, unet.parameters(), strict=True):
                    s.lerp_(p, 0.1)

    @torch.no_grad()
    def save(folder):
        torch.save({"unet": unet.state_dict(), "ema": shadow, "optimizer": optimizer.state_dict()}, folder / "state.pt")
        raw = [p.detach().clone() for p in unet.parameters()]
        for s, p in zip(shadow, unet.parameters(), strict=True):
            p.copy_(s)
        torch.save(unet.state_dict(), folder / "export.pt")
        for r, p in zip(raw, unet.parameters(), strict=True):
            p.copy_(r)

    def load(folder):
        saved = torch.load(folder / "state.pt")
        unet.load_state_dict(saved["unet"])
        optimizer.load_state_dict(saved["optimizer"])
        for s, v in zip(shadow, saved["ema"], strict=True):
            s.copy_(v)

    g = torch.Generator().manual_seed(29)
    data = [(x, torch.randn(x.shape, generator=g), torch.rand(len(x), 1, generator=g)) for x in vectors()]
    return TrainLoop(model=unet, optimizer=optimizer, batches=data, fit=fit, save=save, load=load)


@right(
    "checkpoints",
    "the noise of a step is seeded by the step's number, which is saved; no generator is",
    thread="vllm-project/speculators#1027",
)
def seeded_by_step():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.9)
    run = {"step": 0}

    def fit(batches):
        for x in batches:
            g = torch.Generator().manual_seed(1000 + run["step"])
            noisy = x + 0.3 * torch.randn(x.shape, generator=g)
            optimizer.zero_grad()
            F.mse_loss(model(noisy), x).backward()
            optimizer.step()
            run["step"] += 1

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run["step"] = state["step"]

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=vectors(),
        fit=fit,
        save=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": run["step"]},
        load=load,
    )


@right(
    "checkpoints",
    "truncated backpropagation: the hidden state begins at zero in each call of fit, an epoch",
    thread="pytorch/examples word_language_model",
)
def hidden_state_per_epoch():
    lstm, head, embed = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 24), nn.Embedding(24, 12)
    model = nn.ModuleList([embed, lstm, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        hidden = None
        for ids in batches:
            out, hidden = lstm(embed(ids[:, :-1]), hidden)
            hidden = tuple(h.detach() for h in hidden)
            optimizer.zero_grad()
            F.cross_entropy(head(out).flatten(0, 1), ids[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    def load(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=tokens(),
        fit=fit,
        save=lambda path: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@right(
    "checkpoints",
    "two optimizers of one model (matrices and the rest), both saved as a list",
    thread="vllm-project/speculators#1061",
)
def two_optimizers_one_model():
    model = GPT()
    matrices = [p for p in model.block.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [
        torch.optim.SGD(matrices, lr=0.05, momentum=0.95, nesterov=True),
        torch.optim.AdamW(rest, lr=5e-3),
    ]
    schedulers = [OneCycleLR(o, max_lr=o.param_groups[0]["lr"], total_steps=100) for o in optimizers]

    def fit(batches):
        for ids in batches:
            model(ids).backward()
            for o, s in zip(optimizers, schedulers, strict=True):
                o.step()
                s.step()
            model.zero_grad(set_to_none=True)

    def save():
        return {
            "model": model.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers],
            "schedulers": [s.state_dict() for s in schedulers],
        }

    def load(state):
        model.load_state_dict(state["model"])
        for key, parts in (("optimizers", optimizers), ("schedulers", schedulers)):
            for part, saved in zip(parts, state[key], strict=True):
                part.load_state_dict(saved)

    return TrainLoop(
        model=model,
        optimizer=optimizers,
        scheduler=schedulers,
        batches=tokens(),
        fit=fit,
        save=save,
        load=load,
    )


@right(
    "checkpoints",
    "the new head of a transfer is left out by a filter on shapes; the rest is loaded, and it is declared",
    thread="pytorch/pytorch#3159",
)
def transfer_with_new_head():
    backbone = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
    head = nn.Linear(24, 4)
    model = nn.ModuleDict({"backbone": backbone, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(head(backbone(x)), y).backward()
            optimizer.step()

    def load(path):
        saved = {k: v for k, v in torch.load(path).items() if not k.startswith("head.")}
        model.load_state_dict(saved, strict=False)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(),
        fit=fit,
        save=lambda path: torch.save(model.state_dict(), path),
        load=load,
        renews=("model.head", "optimizer"),
    )


@right(
    "checkpoints",
    "a peft model: adapter weights through get_peft_model_state_dict, the base is the pretrained one",
    thread="huggingface/peft: get_peft_model_state_dict",
)
def peft_adapter():
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    first, second = pretrained(12, 16, 16)
    (last,) = pretrained(16, 4)
    base = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0", "2"], modules_to_save=["4"], lora_dropout=0.0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def fit(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def load(path):
        saved = torch.load(path)
        set_peft_model_state_dict(model, saved["adapter"])
        optimizer.load_state_dict(saved["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(),
        fit=fit,
        save=lambda path: torch.save(
            {"adapter": get_peft_model_state_dict(model), "optimizer": optimizer.state_dict()}, path
        ),
        load=load,
    )
