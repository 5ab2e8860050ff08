"""Evaluations that leave something behind, as projects wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


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
