"""Networks with parts that start at zero or cancel, and therefore get no gradient at first, or never any."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, images, points, series


def train(model, optimizer, batches, criterion=F.cross_entropy):
    for x, y in batches:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


class ReZeroBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net, self.gate = relu_mlp(width, width, width), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * self.net(x)


@odd(notes="gates of 0: all weights inside the blocks have a gradient of exactly 0 on the first step (ReZero)")
def rezero_gates() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 12), ReZeroBlock(12), ReZeroBlock(12), nn.Linear(12, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


class LayerScaleBlock(nn.Module):
    def __init__(self, width, init=1e-5):
        super().__init__()
        self.norm, self.net = nn.LayerNorm(width), mlp(width, 2 * width, width, activation=nn.GELU)
        self.gamma = nn.Parameter(init * torch.ones(width))

    def forward(self, x):
        return x + self.gamma * self.net(self.norm(x))


@odd(notes="branches scaled by 1e-5: gradients inside them are 1e-5 times the others' (LayerScale)")
def layer_scale_tiny_branches() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 12), LayerScaleBlock(12), nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        fit=lambda batches: train(model, optimizer, batches, F.mse_loss),
    )


@odd(notes="a head of zeros: on the first step nothing below it has a gradient, and all outputs are equal")
def zero_initialised_head() -> TrainLoop:
    model = relu_mlp(8, 16, 16, 4)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        fit=lambda batches: train(model, optimizer, batches),
    )


def zeroed(layer):
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


class ControlNet(nn.Module):
    """A locked net and a trainable copy of its encoder, joined by convolutions that start at zero."""

    def __init__(self, width=4):
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, width, 3, padding=1), nn.Conv1d(width, 1, 3, padding=1)
        self.requires_grad_(False)
        self.control = copy.deepcopy(self.encoder).requires_grad_(True)
        self.zero_in = zeroed(nn.Conv1d(1, 1, 1))
        self.zero_out = zeroed(nn.Conv1d(width, width, 1))

    def forward(self, x, hint):
        h = torch.relu(self.encoder(x))
        h = h + self.zero_out(torch.relu(self.control(x + self.zero_in(hint))))
        return self.decoder(h)


def train_control(model, optimizer, batches):
    for x, hint in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x + 0.1 * torch.randn_like(x), hint), hint).backward()
        optimizer.step()


@odd(
    notes="two layers of zeros in a row: the copy and the inner one have no gradient until the outer one moved; "
    "a locked base beside a copy of it (ControlNet)"
)
def controlnet_zero_convolutions() -> TrainLoop:
    model = ControlNet()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    waves = series(6, 12, 1).transpose(1, 2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(waves, waves.flip(0)),
        fit=lambda batches: train_control(model, optimizer, batches),
    )


class PlainConvNet(nn.Module):
    """Written by someone who left the bias on in front of batch norm; all activations in place."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * 4, 4)

    def forward(self, x):
        x = F.max_pool2d(self.relu(self.norm1(self.conv1(x))), 2)
        y = self.norm2(self.conv2(x))
        y += x
        return self.head(F.adaptive_avg_pool2d(self.relu(y), 2).flatten(1))


@odd(
    notes="biases in front of batch norm have a gradient of rounding noise, and the loss does not depend on them; "
    "in-place everywhere"
)
def conv_bias_before_batch_norm() -> TrainLoop:
    model = PlainConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=images(),
        batches=fresh(images),
        fit=lambda batches: train(model, optimizer, batches),
    )


class Attention(nn.Module):
    """Self-attention with separate projections, the key's bias included, which softmax cancels."""

    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        def split(t):
            return t.view(*t.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        weights = (q @ k.transpose(-1, -2) / q.size(-1) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TinyViT(nn.Module):
    """Class token, positions longer than the input, and a last block that is read at one position only."""

    def __init__(self, width=12):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), mlp(width, 16, width, activation=nn.GELU)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        x = x + self.position[:, : x.size(1)]
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x[:, 0])


@odd(
    notes="the key's bias cancels in softmax: its gradient is rounding noise; "
    "most rows of the position table are never used"
)
def vit_with_key_bias() -> TrainLoop:
    model = TinyViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=images(),
        fit=lambda batches: train(model, optimizer, batches),
    )


@odd(notes="attention over a memory that holds one entry in these batches, and more in others: its weights are all 1")
def memory_of_one_entry() -> TrainLoop:
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = nn.Linear(6, 12), nn.Linear(5, 12), nn.Linear(5, 12)
            self.out = nn.Linear(12, 1)

        def forward(self, x, memory):
            scores = self.query(x)[:, None] @ self.key(memory).transpose(1, 2) / 12**0.5
            return self.out((scores.softmax(-1) @ self.value(memory))[:, 0])

    def draw():
        x, memory = torch.randn(8, 6), torch.randn(8, 1, 5)
        return x, memory, x[:, :1].sin() + memory[:, 0, :1]

    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, memory, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x, memory), y).backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batch=draw(), batches=lambda n: [draw() for _ in range(n)], fit=fit
    )
