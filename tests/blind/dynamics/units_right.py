"""Units that are silent or at their bounds, and are meant to be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def fit_model(model, optimizer, loss_fn, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def class_loader(features=16, classes=4, batch_size=16, rows=96):
    x = torch.randn(rows, features)
    return DataLoader(TensorDataset(x, x[:, :classes].argmax(1)), batch_size=batch_size, shuffle=True)


class TopKAutoencoder(nn.Module):
    def __init__(self, inputs=16, latents=64, k=4):
        super().__init__()
        self.k = k
        self.bias = nn.Parameter(torch.zeros(inputs))
        self.encoder = nn.Linear(inputs, latents)
        self.decoder = nn.Linear(latents, inputs, bias=False)
        with torch.no_grad():
            self.decoder.weight.copy_(self.encoder.weight.T)

    def forward(self, x):
        f = F.relu(self.encoder(x - self.bias))
        values, indices = f.topk(self.k, dim=-1)
        f = torch.zeros_like(f).scatter(-1, indices, values)
        return self.decoder(f) + self.bias


@right(
    "units",
    "a k-sparse autoencoder: four of 64 latents fire for each row, and many for none of a batch",
    thread="EleutherAI/sparsify#57",
)
def top_k_latents():
    model = TopKAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    basis = torch.randn(24, 16)

    def train(batches):
        for x in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [torch.relu(torch.randn(16, 24) - 1) @ basis for _ in range(n)],
        fit=train,
    )


class Quantizer(nn.Module):
    def __init__(self, codes=32, width=8, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("total", self.codebook.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codebook).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, len(self.codebook)).to(z)
                self.usage.lerp_(hot.sum(0), 1 - self.decay)
                self.total.lerp_(hot.T @ z, 1 - self.decay)
                used = self.usage > 0.05
                self.codebook[used] = self.total[used] / self.usage[used, None]
        quantized = self.codebook[index]
        return z + (quantized - z).detach(), F.mse_loss(z, quantized.detach())


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.quantize = Quantizer()
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        z, commit = self.quantize(self.encode(x))
        return self.decode(z), commit


@right(
    "units",
    "a batch uses a few of the 32 codes, and the others stay where they are: an average updates the codebook",
    thread="openai/jukebox#231",
)
def few_codes_in_use():
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        model.train()
        for x in batches:
            recon, commit = model(x)
            loss = F.mse_loss(recon, x) + 0.25 * commit
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=lambda n: [torch.randn(8, 16) for _ in range(n)], fit=train
    )


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        with torch.no_grad():
            self.backbone[0].bias[:20] = -6.0
        self.backbone.requires_grad_(False).eval()
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


@right(
    "units",
    "a third of the frozen backbone's ReLUs never fire on this data, as pretrained ones may: only the head trains",
    thread="keras-team/keras#7057",
)
def linear_probe():
    model = Probe()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=class_loader(),
        fit=lambda batches: fit_model(model, optimizer, F.cross_entropy, batches),
        frozen=("backbone.",),
    )


class Highway(nn.Module):
    def __init__(self, width=24, layers=3):
        super().__init__()
        self.input = nn.Linear(16, width)
        self.plain = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for gate in self.gate:
            nn.init.constant_(gate.bias, -4.0)
        self.output = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.tanh(self.input(x))
        for plain, gate in zip(self.plain, self.gate, strict=True):
            t = torch.sigmoid(gate(x))
            x = t * torch.relu(plain(x)) + (1 - t) * x
        return self.output(x)


@right(
    "units",
    "transform gates of a highway net start almost closed (bias -4), so that it begins as the identity",
    thread="https://arxiv.org/abs/1505.00387",
)
def highway_gates():
    model = Highway()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=class_loader(),
        fit=lambda batches: fit_model(model, optimizer, F.cross_entropy, batches),
    )


class ZeroInitBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


@right(
    "units",
    "the last layer of each residual branch starts at zero: the ones before it get no gradient in the first step only",
    thread="openai/improved-diffusion#130",
)
def zero_module():
    model = nn.Sequential(nn.Linear(16, 24), ZeroInitBlock(24), ZeroInitBlock(24), nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=class_loader(),
        fit=lambda batches: fit_model(model, optimizer, F.cross_entropy, batches),
    )


class SwitchLayer(nn.Module):
    def __init__(self, width=16, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(experts)
        )

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, index = probs.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = (index == i).nonzero().squeeze(1)
            out = out.index_add(0, chosen, gate[chosen, None] * expert(x[chosen]))
        load = F.one_hot(index, len(self.experts)).float().mean(0)
        return x + out, len(self.experts) * (load * probs.mean(0)).sum()


class SwitchClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = SwitchLayer()
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x, aux = self.moe(x)
        return self.head(x), aux


@right(
    "units",
    "top-1 routing: in a batch an expert may get few rows or none, and an auxiliary loss balances them over time",
    thread="lucidrains/mixture-of-experts#10",
)
def switch_routing():
    model = SwitchClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train(batches):
        for x, y in batches:
            logits, aux = model(x)
            loss = F.cross_entropy(logits, y) + 0.01 * aux
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=class_loader(), fit=train, rows_interact=True)


class BinaryActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class BinaryNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 48)
        self.bn1 = nn.BatchNorm1d(48)
        self.second = nn.Linear(48, 48)
        self.bn2 = nn.BatchNorm1d(48)
        self.out = nn.Linear(48, 4)

    def forward(self, x):
        x = BinaryActivation.apply(self.bn1(self.first(x)))
        x = BinaryActivation.apply(F.hardtanh(self.bn2(self.second(x))))
        return self.out(x)


@right(
    "units",
    "binary activations: every unit is at -1 or 1, and a straight-through gradient passes where |x| <= 1",
    thread="itayhubara/BinaryNet.pytorch",
)
def binary_network():
    model = BinaryNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=class_loader(),
        fit=lambda batches: fit_model(model, optimizer, F.cross_entropy, batches),
    )


class TagClassifier(nn.Module):
    def __init__(self, vocabulary=300, width=24, tags=5):
        super().__init__()
        self.bag = nn.Linear(vocabulary, width, bias=False)
        self.offset = nn.Parameter(torch.full((width,), -0.05))
        self.out = nn.Linear(width, tags)

    def forward(self, counts):
        return self.out(F.relu(self.bag(counts.clamp(max=1)) + self.offset))


@right(
    "units",
    "inputs are bags of words, almost all zero: a batch touches few columns, and a ReLU fires for few documents",
    thread="keras-team/keras-contrib#115",
)
def bag_of_words():
    model = TagClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    counts = torch.poisson(torch.full((96, 300), 0.01))
    tags = (torch.rand(96, 5) < 0.2).float()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(counts, tags), batch_size=16, shuffle=True),
        fit=lambda batches: fit_model(model, optimizer, F.binary_cross_entropy_with_logits, batches),
    )


@right(
    "units",
    "most hidden units are dropped in each pass: a strong dropout silences units by chance and not for good",
    thread="keras-team/keras-contrib#262",
)
def strong_dropout():
    model = nn.Sequential(
        nn.Linear(16, 96),
        nn.LeakyReLU(0.01),
        nn.Dropout(0.7),
        nn.Linear(96, 48),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(48, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=class_loader(),
        fit=lambda batches: fit_model(model, optimizer, F.cross_entropy, batches),
    )


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, obs):
        return torch.tanh(self.body(obs))


@right(
    "units",
    "bang-bang demonstrations: the right actions are at -1 and 1, so that a good actor's tanh is near its bounds",
    thread="openai/baselines#131",
)
def behaviour_cloning():
    actor = Actor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=5e-3)
    obs = torch.randn(96, 6)
    actions = torch.stack([obs[:, 0], obs[:, 1] - obs[:, 2]], 1).sign()
    return TrainLoop(
        model=actor,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(obs, actions), batch_size=16, shuffle=True),
        fit=lambda batches: fit_model(actor, optimizer, F.smooth_l1_loss, batches),
    )
