"""Fine-tuning: frozen bases, adapters that start at zero, parameters that the optimizer must not or need not hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points, tokens


def train(model, optimizer, batches):
    model.train()
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Base(nn.Module):
    """Stands for a pretrained classifier."""

    def __init__(self, width=12):
        super().__init__()
        self.proj_in = nn.Linear(8, width)
        self.block = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def features(self, x):
        h = torch.relu(self.proj_in(x))
        return self.norm(h + torch.relu(self.block(h)))

    def forward(self, x):
        return self.head(self.features(x))


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scaling * (x @ self.lora_a.T @ self.lora_b.T)


def with_lora(model):
    model.requires_grad_(False)
    model.proj_in, model.block = LoRALinear(model.proj_in), LoRALinear(model.block)
    model.head.requires_grad_(True)
    return model


@odd(
    notes="B starts at 0, so every A has a gradient of exactly 0 at first; the base is frozen and held by nobody (LoRA)"
)
def lora_zero_b_base_frozen() -> TrainLoop:
    model = with_lora(Base())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.0)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


@odd(notes="the optimizer was given all parameters; the frozen ones never have a gradient (LoRA)")
def lora_whole_model_in_optimizer() -> TrainLoop:
    model = with_lora(Base())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train(model, optimizer, batches),
    )


class DoRALinear(LoRALinear):
    """Weight-decomposed LoRA; the norm is detached, as its paper recommends."""

    def __init__(self, base):
        super().__init__(base)
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1))

    def forward(self, x):
        weight = self.base.weight + self.scaling * self.lora_b @ self.lora_a
        direction = weight / weight.norm(dim=1, keepdim=True).detach()
        return F.linear(x, self.magnitude[:, None] * direction, self.base.bias)


@odd(notes="detach inside the forward pass, on purpose; the base layer is used by its weight and never called (DoRA)")
def dora_detached_norm() -> TrainLoop:
    model = Base().requires_grad_(False)
    model.block, model.head = DoRALinear(model.block), DoRALinear(model.head)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2, weight_decay=0.0)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


class Bottleneck(nn.Module):
    """Houlsby adapter: a residual branch whose second layer starts at zero."""

    def __init__(self, inner, width=12, size=4):
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(width, size), nn.Linear(size, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        h = self.inner(x)
        return h + self.up(F.gelu(self.down(h)))


@odd(
    notes="the adapter's down-projection has no gradient at first, its up-projection is all zeros; "
    "norms train, the rest is frozen"
)
def bottleneck_adapters() -> TrainLoop:
    model = Base().requires_grad_(False)
    model.block = Bottleneck(model.block)
    model.norm.requires_grad_(True)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train(model, optimizer, batches),
    )


@odd(notes="only biases require grad, and the loop finds out by name (BitFit)")
def bitfit_only_biases() -> TrainLoop:
    model = Base()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias")
    optimizer = torch.optim.SGD((p for n, p in model.named_parameters() if "bias" in n), lr=0.3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


class PromptTuned(nn.Module):
    def __init__(self, vocabulary=16, width=12, prompts=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.requires_grad_(False)
        self.prompt = nn.Parameter(0.5 * torch.randn(prompts, width))

    def forward(self, ids):
        prompt = self.prompt.expand(len(ids), -1, -1)
        states, _ = self.rnn(torch.cat([prompt, self.embed(ids)], 1))
        return self.head(states[:, self.prompt.size(0) - 1 : -1])


def train_prompt(model, optimizer, batches):
    for ids in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()


@odd(notes="one bare parameter trains; the gradient passes through a whole frozen network to reach it (prompt tuning)")
def prompt_tuning() -> TrainLoop:
    model = PromptTuned()
    optimizer = torch.optim.Adam([model.prompt], lr=5e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=tokens(rows=4, length=5),
        fit=lambda batches: train_prompt(model, optimizer, batches),
    )


class LinearProbe(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Base().requires_grad_(False)
        self.backbone.head = nn.Identity()
        self.probe = nn.Linear(12, 4)

    def forward(self, x):
        with torch.no_grad():
            h = self.backbone(x)
        return self.probe(h)


@odd(notes="most of the forward pass runs under no_grad, over parameters that require none (linear probe)")
def linear_probe_backbone_under_no_grad() -> TrainLoop:
    model = LinearProbe()
    optimizer = torch.optim.SGD(model.probe.parameters(), lr=0.3, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


class FeatureExtractor(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = relu_mlp(8, 12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h)


@odd(notes="the backbone runs under no_grad, requires grad and is held by nobody: declared as frozen")
def backbone_declared_frozen() -> TrainLoop:
    model = FeatureExtractor()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=2e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        frozen=("backbone.",),
        fit=lambda batches: train(model, optimizer, batches),
    )


def train_textual_inversion(model, optimizer, new_id, batches):
    table = model.embed.weight
    original = table.detach().clone()
    others = torch.arange(len(table)) != new_id
    for ids, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model.head(torch.tanh(model.embed(ids).mean(1))), y).backward()
        optimizer.step()
        with torch.no_grad():
            table[others] = original[others]


class BagOfWords(nn.Module):
    def __init__(self, vocabulary=10, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, 4)


@odd(notes="the whole table is optimised and all rows but one are restored after each step (textual inversion)")
def textual_inversion_one_row() -> TrainLoop:
    model = BagOfWords()
    model.head.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.embed.parameters(), lr=5e-2)
    ids = torch.cat([torch.full((6, 1), 9), torch.randint(9, (6, 2))], 1)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(ids, torch.full((6,), 2)),
        fit=lambda batches: train_textual_inversion(model, optimizer, 9, batches),
    )
