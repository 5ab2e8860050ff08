"""Evaluations that leave something behind or only seem to, memory of earlier steps, and the order of the data."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
)

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault, right
from tests.loops.nets import relu_mlp
from tests.loops.threads.shared import clusters, cross_entropy_of, fit_with, stepped


def loaders():
    x, y = clusters(96, 12, 4, spread=1.5, noise=1.0, seed=1)
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    return DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=16)


def text(n, length, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, vocab, (n, 1), generator=g)
    step = torch.randint(1, 4, (n, 1), generator=g)
    return (start + step * torch.arange(length)) % vocab


def mlp(hidden=32, dropout=0.0):
    return nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 4))


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

    return stepped(
        model,
        optimizer,
        lambda x, y: F.binary_cross_entropy_with_logits(model(x), y),
        train=True,
        batches=train_loader,
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

    @torch.inference_mode()
    def evaluate():
        model.eval()
        perplexity = math.exp(lm_loss(val_data).item())
        model.train()
        return perplexity

    return stepped(
        model, optimizer, lm_loss, train=True, batches=DataLoader(train_data, batch_size=8), evaluate=evaluate
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
    model = relu_mlp(8, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_of(past, future):
        pred = model((past - mean) / std).squeeze(1)
        return F.mse_loss(pred, (future - mean) / std)

    @torch.no_grad()
    def score():
        val = Windows(series[48:]).standardize(mean, std)
        x, y = zip(*[val[i] for i in range(len(val))], strict=False)
        return F.l1_loss(model(torch.stack(x)).squeeze(1), torch.stack(y)).item()

    fit, batches = fit_with(optimizer, loss_of), DataLoader(train_set, batch_size=8)
    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit, evaluate=score)


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

    return stepped(model, optimizer, cross_entropy_of(model), train=True, batches=train_loader, evaluate=evaluate)


@right(
    "evaluation",
    "dropout at test time is meant: the prenet of Tacotron drops in evaluation too",
    thread="BogiHsu/Tacotron2-PyTorch#8",
)
def tacotron_prenet():
    class Prenet(nn.Module):
        def __init__(self, din, sizes):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip([din, *sizes], sizes, strict=False))

        def forward(self, x):
            for layer in self.layers:
                x = F.dropout(F.relu(layer(x)), p=0.5, training=True)
            return x

    class Decoder(nn.Module):
        def __init__(self, mels=6):
            super().__init__()
            self.prenet, self.rnn, self.proj = (
                Prenet(mels, (16, 16)),
                nn.GRU(16, 24, batch_first=True),
                nn.Linear(24, mels),
            )

        def forward(self, mels):
            return self.proj(self.rnn(self.prenet(mels))[0])

    g = torch.Generator().manual_seed(0)
    mels = torch.randn(40, 12, 6, generator=g).cumsum(1) * 0.2
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-6)

    def train(batches):
        model.train()
        for (mel,) in batches:
            optimizer.zero_grad()
            F.mse_loss(model(mel[:, :-1]), mel[:, 1:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def validate():
        model.eval()
        with torch.no_grad():
            loss = F.mse_loss(model(mels[32:, :-1]), mels[32:, 1:]).item()
        model.train()
        return loss

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(mels[:32]), batch_size=8, shuffle=True),
        fit=train,
        evaluate=validate,
    )


@right(
    "evaluation",
    "accelerate prepares the loaders; validation gathers outputs and leaves eval() to the next epoch",
    thread="huggingface/accelerate nlp_example",
)
def accelerate_example():
    from pytest_trainloop.adapters import fresh_accelerator

    accelerator = fresh_accelerator(cpu=True)
    train_loader, val_loader = loaders()
    model = mlp(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, val_loader = accelerator.prepare(model, optimizer, val_loader)

    def train(batches):
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def evaluate():
        model.eval()
        pred, ref = [], []
        for x, y in val_loader:
            with torch.no_grad():
                logits = model(x)
            p, r = accelerator.gather_for_metrics((logits.argmax(-1), y))
            pred.append(p)
            ref.append(r)
        return (torch.cat(pred) == torch.cat(ref)).float().mean().item()

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=evaluate)


@right(
    "evaluation",
    "the detector gives losses in train mode only: it validates there with norms and dropout in eval(), "
    "and puts all flags back",
    thread="facebookresearch/maskrcnn-benchmark#785",
)
def detector_loss_mode():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.1)
            )
            self.boxes, self.labels = nn.Linear(128, 4), nn.Linear(128, 3)

        def forward(self, images, targets=None):
            feats = self.backbone(torch.stack(images)).flatten(1)
            boxes, logits = self.boxes(feats), self.labels(feats)
            if self.training:
                gt, cls = torch.stack([t["boxes"][0] for t in targets]), torch.cat([t["labels"] for t in targets])
                return {"box": F.smooth_l1_loss(boxes, gt), "cls": F.cross_entropy(logits, cls)}
            return [{"boxes": b[None], "scores": s.softmax(0)} for b, s in zip(boxes, logits, strict=True)]

    g = torch.Generator().manual_seed(0)

    def sample(_):
        label = torch.randint(0, 3, (1,), generator=g)
        return torch.randn(1, 8, 8, generator=g) + label, {"boxes": torch.rand(1, 4, generator=g), "labels": label}

    def collate(items):
        return tuple(zip(*items, strict=True))

    train_loader = DataLoader([sample(i) for i in range(32)], batch_size=4, shuffle=True, collate_fn=collate)
    val_loader = DataLoader([sample(i) for i in range(8)], batch_size=4, collate_fn=collate)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def train(batches):
        for images, targets in batches:
            model.train()
            loss = sum(model(list(images), list(targets)).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def validation_loss():
        modes = {m: m.training for m in model.modules()}
        model.train()
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d | nn.Dropout2d):
                m.eval()
        total = sum(sum(model(list(i), list(t)).values()).item() for i, t in val_loader)
        for m, mode in modes.items():
            m.training = mode
        return total / len(val_loader)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validation_loss)


@right("memory", "retain_graph=True for the first of two backward passes over one graph", thread="isds-neu/PeRCNN#3")
def two_backward_passes():
    trunk, heads = nn.Linear(12, 24), nn.ModuleList([nn.Linear(24, 4), nn.Linear(24, 12)])
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=3e-3)

    loader = DataLoader(TensorDataset(*clusters(64, 12, 4, spread=1.5, noise=1.0, seed=1)), batch_size=8, shuffle=True)

    def train(batches):
        for x, y in batches:
            h = F.relu(trunk(x))
            optimizer.zero_grad()
            F.cross_entropy(heads[0](h), y).backward(retain_graph=True)
            nn.utils.clip_grad_norm_(trunk.parameters(), 1.0)
            (0.5 * F.mse_loss(heads[1](h), x)).backward()
            optimizer.step()

    return TrainLoop(model={"trunk": trunk, "heads": heads}, optimizer=optimizer, batches=loader, fit=train)


def table(rows):
    return clusters(rows, 8, 4, noise=0.5, seed=30)


@fault(
    "data_order",
    "the IterableDataset is not split over the workers: each of the two gives every row",
    thread="huggingface/datasets#3423",
    check="data_order",
)
def streamed_rows():
    class Stream(IterableDataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __iter__(self):
            for features, label in zip(self.x, self.y, strict=True):
                yield {"features": features, "label": label}

    loader = DataLoader(Stream(*table(rows=32)), batch_size=8, num_workers=2)
    model = relu_mlp(8, 24, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return stepped(
        model, optimizer, lambda batch: F.cross_entropy(model(batch["features"]), batch["label"]), batches=loader
    )


@fault(
    "data_order",
    "the loader's last batch has one row, on which batch norm raises in training",
    thread="azavea/raster-vision#1029",
    check="data_order",
)
def batch_norm_classifier():
    loader = DataLoader(TensorDataset(*table(rows=33)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
