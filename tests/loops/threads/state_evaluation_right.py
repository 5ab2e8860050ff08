"""Evaluations that look as if they changed training, and do not (or are meant to), as projects wrote them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def blobs(n=64, width=12, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=g) * 1.5
    y = torch.randint(0, classes, (n,), generator=g)
    return centers[y] + torch.randn(n, width, generator=g), y


def loaders(batch_size=8, width=12, classes=4, shuffle_val=False):
    x, y = blobs(96, width, classes, seed=1)
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=16, shuffle=shuffle_val)


def mlp(width=12, classes=4, hidden=32, dropout=0.0, norm=False):
    layers = [nn.Linear(width, hidden)]
    if norm:
        layers.append(nn.BatchNorm1d(hidden))
    layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


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
