"""Mixed precision as it should be: autocast in bfloat16 and, with a scaler, in float16; static scales; sums kept in
float32."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import images, points, series, tokens

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision, device="cpu"):
    return torch.autocast(device, dtype=DTYPES[precision]) if precision in DTYPES else contextlib.nullcontext()


def moved(batch, device):
    return tuple(t.to(device) for t in batch) if isinstance(batch, tuple) else batch.to(device)


def mixed(model, batch, loss_of, precision, device, *, optimizer_of=None, clip=None, init_scale=2.0**16):
    """The loop of torch's own amp examples."""
    model, batch = model.to(device), moved(batch, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3) if optimizer_of is None else optimizer_of(trained)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16", init_scale=init_scale)

    def fit(batches):
        model.train()
        for item in batches:
            optimizer.zero_grad(set_to_none=True)
            with autocast(precision, device):
                loss = loss_of(model, item)
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(trained, clip)
            scaler.step(optimizer)
            scaler.update()

    return TrainLoop(model=model, optimizer=optimizer, scaler=scaler, batch=batch, fit=fit)


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.1, *, causal=True):
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, dim=-1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.out(h.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.between(x)), self.dropout, self.training)


class Gpt(nn.Module):
    def __init__(self, vocabulary=16, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width, 4), Block(width, 4)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@odd(notes="tied weights, dropout and attention in low precision, norms and the loss in float32 by autocast")
def mixed_gpt(precision="bf16", device="cpu") -> TrainLoop:
    return mixed(Gpt(), tokens(), next_token, precision, device, clip=1.0)


@odd(notes="batch norm in low precision; a scale that begins far too high")
def mixed_convolutions(precision="bf16", device="cpu") -> TrainLoop:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def loss_of(m, b):
        return F.cross_entropy(m(b[0]), b[1])

    return mixed(model, images(16), loss_of, precision, device, optimizer_of=momentum, init_scale=2.0**24)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 16, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@odd(notes="a recurrent kernel whose products are not seen from outside")
def mixed_lstm(precision="bf16", device="cpu") -> TrainLoop:
    return mixed(Reader(), series(), lambda m, x: F.mse_loss(m(x[:, :-1]).float(), x[:, 1:]), precision, device)


class Vit(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.block, self.norm, self.head = Block(width, 4, causal=False), nn.LayerNorm(width), nn.Linear(width, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.norm(self.block(x))[:, 0])


@odd(notes="a head that starts at zero: only its own gradient is there at first")
def mixed_vit(precision="bf16", device="cpu") -> TrainLoop:
    return mixed(Vit(), images(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), precision, device)


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


@odd(notes="a frozen base in bfloat16, float32 adapters whose B is zero")
def mixed_lora(precision="bf16", device="cpu") -> TrainLoop:
    low = DTYPES.get(precision, torch.float32)
    model = nn.Sequential(Lora(nn.Linear(8, 32).to(low)), nn.GELU(), Lora(nn.Linear(32, 4).to(low)))
    return mixed(model, points(16), lambda m, b: F.cross_entropy(m(b[0]).float(), b[1]), precision, device)


def two_views(model, x):
    a, b = (F.normalize(model(x + 0.1 * torch.randn_like(x)).float(), dim=-1) for _ in range(2))
    logits = a @ b.T / 0.1
    return F.cross_entropy(logits, torch.arange(len(x), device=x.device))


@odd(notes="a temperature that multiplies what rounding did, and draws of its own")
def mixed_contrast(precision="bf16", device="cpu") -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    return mixed(model, points(16)[0], two_views, precision, device)


class Experts(nn.Module):
    def __init__(self, width=8, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList([nn.Linear(width, 4) for _ in range(experts)])

    def forward(self, x):
        weights, chosen = self.gate(x).float().softmax(-1).topk(2, dim=-1)
        every = torch.stack([e(x) for e in self.experts], 1)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, every.shape[-1]))
        return (weights[..., None] * picked).sum(1)


@odd(notes="a router that chooses otherwise where two scores lie close together")
def mixed_experts(precision="bf16", device="cpu") -> TrainLoop:
    return mixed(Experts(), points(32), lambda m, b: F.cross_entropy(m(b[0]), b[1]), precision, device)


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.decay, self.outward = nn.Linear(3, 8), nn.Parameter(torch.full((8,), 2.0)), nn.Linear(8, 3)

    def forward(self, x):
        keep = torch.sigmoid(self.decay)
        state, states = torch.zeros(len(x), 8, device=x.device), []
        for u in self.inward(x).float().unbind(1):
            state = keep * state + (1 - keep) * u
            states.append(state)
        return self.outward(torch.stack(states, 1))


@odd(notes="a state that is carried on in float32 inside of autocast")
def mixed_scan(precision="bf16", device="cpu") -> TrainLoop:
    return mixed(Scan(), series(length=24), lambda m, x: F.mse_loss(m(x[:, :-1]), x[:, 1:]), precision, device)


@odd(notes="a static loss scale, multiplied and divided by hand")
def mixed_static_scale(precision="fp16") -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = 4096.0

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            with autocast(precision):
                loss = 1e-4 * F.cross_entropy(model(x), y)
            (loss * scale).backward()
            for p in model.parameters():
                p.grad.mul_(1e4 / scale)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(16), fit=fit)


@odd(notes="codes chosen by distance, the gradient passed straight through")
def mixed_codes(precision="bf16", device="cpu") -> TrainLoop:
    model = nn.ModuleDict(
        {"down": nn.Linear(8, 6), "codes": nn.Embedding(12, 6), "up": nn.Linear(6, 8)},
    )

    def loss_of(m, x):
        z = m["down"](x).float()
        codes = m["codes"].weight
        code = codes[torch.cdist(z, codes).argmin(1)]
        through = z + (code - z).detach()
        return F.mse_loss(m["up"](through).float(), x) + F.mse_loss(code, z.detach()) + F.mse_loss(z, code.detach())

    return mixed(model, points(32)[0], loss_of, precision, device)
