"""Mixed precision: what overflows, underflows, cancels or is added up in too few digits."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.pairs import pair

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision):
    return torch.autocast("cpu", dtype=DTYPES[precision]) if precision in DTYPES else contextlib.nullcontext()


def draws(seed):
    return torch.Generator().manual_seed(seed)


# Scores of long heads leave float16's range before they are divided.


class Attention(nn.Module):
    def __init__(self, width, *, scale_first):
        super().__init__()
        self.scale_first = scale_first
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.5)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scale = q.shape[-1] ** -0.5
        if self.scale_first:
            return self.out(((q * scale) @ k.transpose(-2, -1)).softmax(-1) @ v)
        scores = (q @ k.transpose(-2, -1)) * scale
        return self.out(scores.softmax(-1) @ v)


class Tagger(nn.Module):
    def __init__(self, *, scale_first):
        super().__init__()
        self.embed = nn.Embedding(20, 128)
        self.attention = Attention(128, scale_first=scale_first)
        self.head = nn.Linear(128, 5)

    def forward(self, tokens):
        return self.head(self.attention(16.0 * self.embed(tokens)))


def attention(*, scale_first):
    def make(precision="fp16"):
        model = Tagger(scale_first=scale_first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=1024.0)
        tokens = torch.randint(20, (8, 12), generator=draws(1))

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    logits = model(x)
                loss = F.cross_entropy(logits.float().flatten(0, 1), (x % 5).flatten())
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        return TrainLoop(model=model, optimizer=optimizer, scaler=scaler, batch=tokens, fit=fit)

    return make


pair(
    "attention_scores_overflow_in_float16",
    "precision_parity",
    "overflow",
    faulty=attention(scale_first=False),
    fixed=attention(scale_first=True),
    culprits=("attention",),
    where="scores = (q @ k.transpose(-2, -1)) * scale",
)


# A loss of small numbers: its gradients are below the smallest number of float16.


def small_loss(*, scaled=True, scale=2.0**16):
    def make(precision="fp16"):
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled and precision == "fp16", init_scale=scale)
        x = torch.randn(64, 8, generator=draws(2))
        batch = {"x": x, "y": 1e-3 * x[:, :1] + 1e-3}

        def fit(batches):
            for b in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    out = model(b["x"]) * 1e-3
                    loss = F.mse_loss(out, b["y"])
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "float16_without_a_scaler",
    "precision_parity",
    "underflow",
    faulty=small_loss(scaled=False),
    fixed=small_loss(),
    change='scaler = torch.amp.GradScaler("cpu", enabled=scaled',
)
pair(
    "float16_with_a_scaler_that_begins_at_one",
    "precision_parity",
    "underflow",
    faulty=small_loss(scale=1.0),
    fixed=small_loss(),
    change='scaler = torch.amp.GradScaler("cpu", enabled=scaled',
)


# A norm by hand, over features with a large mean.


class Standardise(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.dtype = dtype

    def forward(self, x):
        x = x.to(self.dtype)
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        spread = (centred * centred).mean(-1, keepdim=True)
        return centred * torch.rsqrt(spread + 1e-5) * self.gain + self.shift


def standardised(dtype):
    def make(precision="bf16"):
        model = nn.Sequential(Standardise(16, dtype if precision == "bf16" else torch.float32), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x = 300.0 + torch.randn(32, 16, generator=draws(3))
        batch = (x, torch.randint(4, (32,), generator=draws(4)))

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    logits = model(x)
                    loss = F.cross_entropy(logits, y)
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "norm_by_hand_in_bfloat16",
    "precision_parity",
    "cancellation",
    faulty=standardised(torch.bfloat16),
    fixed=standardised(torch.float32),
    culprits=("0",),
    where="centred = x - mean",
)


# A running sum over many steps.


class Integrator(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.rate = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)
        self.dtype = dtype

    def forward(self, x):
        change = self.rate(x)
        total = torch.ones(len(x), 4, dtype=self.dtype)
        for step in range(change.shape[1]):
            total = total + (0.004 * change[:, step].square()).to(self.dtype)
        return self.out(total)


def integrated(dtype):
    def make(precision="bf16"):
        model = Integrator(dtype if precision == "bf16" else torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        batch = (torch.randn(8, 400, 4, generator=draws(7)), torch.randn(8, 2, generator=draws(8)))

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    out = model(x)
                loss = F.mse_loss(out.float(), y)
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "long_sum_in_bfloat16",
    "precision_parity",
    "accumulation",
    faulty=integrated(torch.bfloat16),
    fixed=integrated(torch.float32),
    where="total = total + ",
)


# A function with a backward of its own that squares in half precision.


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.half())
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        e = torch.exp(-x)
        return (grad.half() * (1 + e + x * e) / (1 + e) ** 2).to(grad.dtype)


class SwishInFloat(Swish):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.float())
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return (grad.float() * s * (1 + x * (1 - s))).to(grad.dtype)


class Gated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 1)
        self.function = function

    def forward(self, x):
        return self.down(self.function.apply(self.up(x)))


def swish(function):
    def make(precision="bf16"):
        model = Gated(function)
        with torch.no_grad():
            model.up.bias.sub_(7.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        x = torch.randn(32, 6, generator=draws(9))
        batch = (x, x.sum(1, keepdim=True))

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    out = model(x)
                F.mse_loss(out.float(), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "own_backward_overflows_in_float16",
    "precision_parity",
    "custom_backward",
    faulty=swish(Swish),
    fixed=swish(SwishInFloat),
    culprits=("Swish",),
    where="self.function.apply(self.up(x))",
)


class FloatHead(nn.Module):
    """The last layer in float32, for the sake of its gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 3)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.to(self.layer.weight.dtype))


def backward_inside(*, inside, head=FloatHead, default="bf16"):
    def make(precision=default):
        model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), head())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = (torch.randn(16, 10, generator=draws(10)), torch.randint(3, (16,), generator=draws(11)))

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with autocast(precision):
                    loss = F.cross_entropy(model(x), y)
                    if inside:
                        loss.backward()
                if not inside:
                    loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "backward_inside_autocast",
    "precision_parity",
    "backward_under_autocast",
    faulty=backward_inside(inside=True),
    fixed=backward_inside(inside=False),
    where="loss.backward()",
)
pair(
    "backward_inside_autocast_that_changes_nothing_yet",
    "precision_parity",
    "backward_under_autocast",
    faulty=backward_inside(inside=True, head=lambda: nn.Linear(32, 3)),
    fixed=backward_inside(inside=False, head=lambda: nn.Linear(32, 3)),
    where="loss.backward()",
    level="advice",
)


# Time steps up to 1000 in a dtype that counts to 256.


class TimeEmbedding(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.width, self.dtype = width, dtype
        self.out = nn.Linear(width, width)

    def forward(self, t):
        rates = torch.exp(torch.linspace(0.0, -6.0, self.width // 2)).to(self.dtype)
        angles = t[:, None].to(self.dtype) * rates
        return self.out(torch.cat([angles.sin(), angles.cos()], -1))


class Denoiser(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.time = TimeEmbedding(16, dtype)
        self.inward, self.outward = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x, t):
        return self.outward(F.silu(self.inward(x) + self.time(t)))


def denoised(dtype):
    def make(precision="bf16"):
        model = Denoiser(dtype if precision == "bf16" else torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        clean = torch.randn(32, 4, generator=draws(12))

        def fit(batches):
            for x in batches:
                t = torch.randint(1000, (len(x),))
                noise = torch.randn_like(x)
                keep = torch.cos(t / 1000 * math.pi / 2)[:, None]
                optimizer.zero_grad()
                with autocast(precision):
                    loss = F.mse_loss(model(keep * x + (1 - keep**2).sqrt() * noise, t), noise)
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=clean, fit=fit)

    return make


pair(
    "time_steps_in_bfloat16",
    "precision_parity",
    "precision_lost",
    faulty=denoised(torch.bfloat16),
    fixed=denoised(torch.float32),
    culprits=("time",),
    where="angles.sin()",
)
