"""Evaluations that look as if they changed training, and do not (or are meant to), as projects wrote them."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def blobs(n=64, width=12, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=g) * 1.5
    y = torch.randint(0, classes, (n,), generator=g)
    return centers[y] + torch.randn(n, width, generator=g), y


def loaders(batch_size=8, width=12, classes=4, shuffle_val=False):
    x, y = blobs(96, width, classes, seed=1)
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=16, shuffle=shuffle_val)


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
    for x, y in batches:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model, loader):
    return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)


@right(
    "evaluation",
    "MC dropout: only the dropouts act, samples are averaged, the modes are put back",
    thread="open-mmlab/mmsegmentation#2441",
)
def mc_dropout():
    train_loader, val_loader = loaders()
    model = mlp(dropout=0.3, norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    @torch.no_grad()
    def evaluate(samples=8):
        model.eval()
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.train()
        entropy = []
        for x, _ in val_loader:
            p = torch.stack([model(x).softmax(1) for _ in range(samples)]).mean(0)
            entropy.append(-(p * p.clamp_min(1e-9).log()).sum(1))
        model.train()
        return torch.cat(entropy).mean().item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


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
    "EMA weights are swapped in and the training weights put back from clones, in a context manager",
    thread="facebookresearch/fairchem#284",
)
def ema_scope():
    train_loader, val_loader = loaders()
    model = mlp(norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    class EMA:
        def __init__(self, params, decay=0.95):
            self.params, self.decay = list(params), decay
            self.shadow = [p.detach().clone() for p in self.params]

        @torch.no_grad()
        def update(self):
            for s, p in zip(self.shadow, self.params, strict=True):
                s.mul_(self.decay).add_(p, alpha=1 - self.decay)

        @contextlib.contextmanager
        def average_parameters(self):
            kept = [p.detach().clone() for p in self.params]
            for s, p in zip(self.shadow, self.params, strict=True):
                p.data.copy_(s)
            try:
                yield
            finally:
                for k, p in zip(kept, self.params, strict=True):
                    p.data.copy_(k)

    ema = EMA(model.parameters())

    def train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ema.update()

    def validate():
        model.eval()
        with ema.average_parameters():
            acc = accuracy(model, val_loader)
        model.train()
        return acc

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validate)


@right(
    "evaluation",
    "the .data tensors of weights and average are exchanged, and exchanged again after validation",
    thread="fadel/pytorch_ema#6",
)
def ema_pointer_swap():
    train_loader, val_loader = loaders()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shadow = {k: v.detach().clone() for k, v in model.named_parameters()}

    def swap():
        for k, p in model.named_parameters():
            p.data, shadow[k] = shadow[k], p.data

    def train(batches):
        for x, y in batches:
            model.train()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            for k, p in model.named_parameters():
                shadow[k].lerp_(p.data, 0.1)

    def validate():
        model.eval()
        swap()
        try:
            return accuracy(model, val_loader)
        finally:
            swap()

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validate)


@right(
    "evaluation",
    "evaluation keeps the best state and counts patience; the state is loaded by a method after training only",
    thread="pytorch/tutorials#188",
)
def early_stopping():
    class EarlyStopping:
        def __init__(self, patience=3):
            self.patience, self.best, self.bad, self.state, self.history = patience, float("inf"), 0, None, []

        def update(self, value, model):
            self.history.append(value)
            if value < self.best:
                self.best, self.bad = value, 0
                self.state = copy.deepcopy(model.state_dict())
            else:
                self.bad += 1
            return self.bad >= self.patience

    class Trainer:
        def __init__(self):
            self.train_loader, self.val_loader = loaders()
            self.model = mlp(norm=True, dropout=0.1)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
            self.stopper, self.should_stop = EarlyStopping(), False

        def fit(self, batches):
            train_steps(self.model, self.optimizer, batches)

        @torch.no_grad()
        def evaluate(self):
            self.model.eval()
            loss = sum(F.cross_entropy(self.model(x), y).item() for x, y in self.val_loader)
            self.should_stop = self.stopper.update(loss, self.model)
            self.model.train()
            return {"loss": loss, "best": self.stopper.best, "bad": self.stopper.bad}

        def finish(self):
            self.model.load_state_dict(self.stopper.state)

    trainer = Trainer()
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        batches=trainer.train_loader,
        fit=trainer.fit,
        evaluate=trainer.evaluate,
    )


@right(
    "evaluation",
    "precise BN: the statistics are re-estimated for validation and the old ones are put back",
    thread="open-mmlab/mmaction2#1054",
)
def precise_bn():
    train_loader, val_loader = loaders(batch_size=16)
    fixed = [x for x, _ in DataLoader(train_loader.dataset, batch_size=16)]
    model = mlp(norm=True, hidden=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    @torch.no_grad()
    def evaluate():
        kept = {k: v.clone() for k, v in model.named_buffers()}
        momenta = {m: m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm1d)}
        model.train()
        for m in momenta:
            m.reset_running_stats()
            m.momentum = None
        for x in fixed:
            model(x)
        model.eval()
        acc = accuracy(model, val_loader)
        for k, v in model.named_buffers():
            v.copy_(kept[k])
        for m, momentum in momenta.items():
            m.momentum = momentum
        model.train()
        return acc

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "validation leaves the model in eval(); each epoch begins with model.train()",
    thread="pytorch/examples imagenet main.py",
)
def imagenet_main():
    class AverageMeter:
        def __init__(self):
            self.sum = self.count = 0.0

        def update(self, value, n):
            self.sum, self.count = self.sum + value * n, self.count + n

        @property
        def avg(self):
            return self.sum / max(self.count, 1)

    train_loader, val_loader = loaders()
    model = mlp(dropout=0.2, norm=True)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)

    def train(batches):
        losses = AverageMeter()
        model.train()
        for images, target in batches:
            output = model(images)
            loss = criterion(output, target)
            losses.update(loss.item(), len(images))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def validate():
        top1 = AverageMeter()
        model.eval()
        with torch.no_grad():
            for images, target in val_loader:
                top1.update((model(images).argmax(1) == target).float().mean().item(), len(images))
        return top1.avg

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validate)


@right(
    "evaluation",
    "validation casts and merges a deep copy of the model, the live one is untouched",
    thread="huggingface/diffusers#13895",
)
def half_precision_copy():
    train_loader, val_loader = loaders()
    model = mlp(norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    @torch.inference_mode()
    def evaluate():
        deployed = copy.deepcopy(model).eval().to(torch.bfloat16)
        linear, norm = deployed[0], deployed[1]
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        linear.weight.mul_(scale[:, None])
        linear.bias.sub_(norm.running_mean).mul_(scale).add_(norm.bias)
        deployed[1] = nn.Identity()
        return sum((deployed(x.bfloat16()).argmax(1) == y).sum().item() for x, y in val_loader) / 32

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "the validation loader shuffles, so evaluation draws from the global generator",
    thread="pytorch/pytorch#80119",
)
def shuffled_validation():
    train_loader, val_loader = loaders(shuffle_val=True)
    model = mlp(dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def evaluate():
        model.eval()
        seen = correct = 0
        with torch.no_grad():
            for x, y in val_loader:
                correct += (model(x).argmax(1) == y).sum().item()
                seen += len(y)
        model.train()
        return correct / seen

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "samples are drawn with a generator of their own that is seeded with 0 each time",
    thread="huggingface/diffusers#175",
)
def sampled_images_own_generator():
    train_loader, _ = loaders()
    net = nn.Sequential(nn.Linear(13, 48), nn.SiLU(), nn.Linear(48, 12))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    alphas = torch.linspace(0.999, 0.05, 20)

    def noise_pred(x, t):
        return net(torch.cat([x, t[:, None] / 20], 1))

    def train(batches):
        net.train()
        for clean, _ in batches:
            noise = torch.randn(clean.shape)
            t = torch.randint(0, 20, (len(clean),))
            a = alphas[t][:, None]
            loss = F.mse_loss(noise_pred(a.sqrt() * clean + (1 - a).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def sample_images():
        net.eval()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, 12, generator=generator)
        for i in reversed(range(20)):
            eps = noise_pred(x, torch.full((6,), i))
            x = ((x - (1 - alphas[i]).sqrt() * eps) / alphas[i].sqrt().clamp(min=0.3)).clamp(-4, 4)
        return x.std().item()

    return TrainLoop(model=net, optimizer=optimizer, batches=train_loader, fit=train, evaluate=sample_images)


@right(
    "evaluation", "torch.manual_seed in evaluation stands inside torch.random.fork_rng()", thread="pytorch/ignite#787"
)
def forked_generator():
    train_loader, val_loader = loaders()
    model = mlp(12, 12, dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def denoise(batches):
        model.train()
        for x, _ in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x + torch.randn_like(x)), x).backward()
            optimizer.step()

    def evaluate():
        model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1234)
            loss = sum(F.mse_loss(model(x + torch.randn_like(x)), x).item() for x, _ in val_loader)
        model.train()
        return loss

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=denoise, evaluate=evaluate)


@right(
    "evaluation",
    "all three generators are reseeded for validation and their states put back by hand",
    thread="ZettaAI/zetta_utils#199",
)
def reseeded_and_restored():
    class FixedSeeds:
        def __init__(self, seed):
            self.seed = seed

        def __enter__(self):
            self.kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
            random.seed(self.seed)
            np.random.seed(self.seed)
            torch.manual_seed(self.seed)

        def __exit__(self, *exc):
            random.setstate(self.kept[0])
            np.random.set_state(self.kept[1])
            torch.set_rng_state(self.kept[2])

    train_loader, val_loader = loaders()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def mask(x):
        return x * (torch.rand_like(x) > 0.25) * (1 + 0.05 * float(np.random.randn())) + 0.01 * random.random()

    def train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(mask(x)), y).backward()
            optimizer.step()

    @torch.no_grad()
    def validate():
        model.eval()
        with FixedSeeds(7):
            return sum(F.cross_entropy(model(mask(x)), y).item() for x, y in val_loader)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validate)


@right(
    "evaluation",
    "the attack of the robust accuracy takes autograd.grad of the inputs only",
    thread="BorealisAI/advertorch#113",
)
def robust_accuracy_pgd():
    train_loader, val_loader = loaders()
    model = mlp(hidden=48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def pgd(x, y, eps=0.2, steps=3):
        delta = torch.zeros_like(x)
        for _ in range(steps):
            delta.requires_grad_(True)
            (g,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
            delta = (delta.detach() + eps / 2 * g.sign()).clamp(-eps, eps)
        return x + delta

    def train(batches):
        model.train()
        for i, (x, y) in enumerate(batches, 1):
            (F.cross_entropy(model(pgd(x, y)), y) / 2).backward()
            if i % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    def robust():
        model.eval()
        hits = 0
        for x, y in val_loader:
            adv = pgd(x, y)
            with torch.no_grad():
                hits += (model(adv).argmax(1) == y).sum().item()
        model.train()
        return hits / 32

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=robust)


@right(
    "evaluation",
    "the saliency of validation calls backward(); the gradients are cleared before it returns, as before each step",
    thread="P2333/Bag-of-Tricks-for-AT#8",
)
def saliency_maps():
    train_loader, val_loader = loaders()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def evaluate():
        was_training = model.training
        model.eval()
        maps = []
        for x, y in val_loader:
            x = x.clone().requires_grad_()
            model(x).gather(1, y[:, None]).sum().backward()
            maps.append(x.grad.abs())
        model.zero_grad(set_to_none=True)
        model.train(was_training)
        return torch.cat(maps).mean(0).argmax().item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "validation gradients stay on the weights, and every training step begins with zero_grad()",
    thread="piergiaj/pytorch-i3d#57",
)
def gradients_left_and_cleared():
    train_loader, val_loader = loaders()
    model = mlp(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def gradient_noise():
        model.eval()
        norms = []
        for x, y in val_loader:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        return float(np.std(norms))

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=gradient_noise)


@right(
    "evaluation",
    "validation steps ReduceLROnPlateau with its loss: the learning rate is meant to follow it",
    thread="wolny/pytorch-3dunet#135",
)
def plateau_after_validation():
    train_loader, val_loader = loaders()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.5)

    class UNetTrainer:
        num_validations, best_score = 0, float("inf")

        def train(self, batches):
            train_steps(model, optimizer, batches)

        def validate(self):
            model.eval()
            with torch.no_grad():
                score = sum(F.cross_entropy(model(x), y).item() for x, y in val_loader) / len(val_loader)
            self.num_validations += 1
            self.best_score = min(self.best_score, score)
            scheduler.step(score)
            model.train()
            return score

    trainer = UNetTrainer()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=train_loader,
        fit=trainer.train,
        evaluate=trainer.validate,
    )


@right(
    "evaluation",
    "metric objects and their log grow with each validation and are reset; nothing in training reads them",
    thread="NRCan/geo-deep-learning#582",
)
def metric_objects():
    class ConfusionMatrix(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.register_buffer("matrix", torch.zeros(classes, classes, dtype=torch.long), persistent=False)

        @torch.no_grad()
        def update(self, logits, y):
            self.matrix.index_put_((y, logits.argmax(1)), torch.ones_like(y), accumulate=True)

        def compute(self):
            m = self.matrix.double()
            return (m.diag() / (m.sum(0) + m.sum(1) - m.diag()).clamp(min=1)).mean().item()

        def reset(self):
            self.matrix.zero_()

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.train_iou, self.val_iou = mlp(), ConfusionMatrix(4), ConfusionMatrix(4)
            self.logged = defaultdict(list)

        def training_step(self, x, y):
            logits = self.net(x)
            self.train_iou.update(logits, y)
            return F.cross_entropy(logits, y)

    train_loader, val_loader = loaders()
    module = Module()
    optimizer = torch.optim.Adam(module.parameters(), lr=5e-3)

    def fit(batches):
        module.train()
        for x, y in batches:
            optimizer.zero_grad()
            module.training_step(x, y).backward()
            optimizer.step()
        module.logged["train/iou"].append(module.train_iou.compute())
        module.train_iou.reset()

    def validate():
        module.eval()
        with torch.no_grad():
            for x, y in val_loader:
                module.val_iou.update(module.net(x), y)
        module.logged["val/iou"].append(module.val_iou.compute())
        module.val_iou.reset()
        module.train()
        return module.logged["val/iou"][-1]

    return TrainLoop(model=module, optimizer=optimizer, batches=train_loader, fit=fit, evaluate=validate)


@right(
    "evaluation",
    "kNN evaluation fills a feature bank on the trainer, which training does not read",
    thread="facebookresearch/moco CIFAR demo with a kNN monitor",
)
def knn_bank():
    class SimCLR:
        def __init__(self):
            self.train_loader, self.val_loader = loaders(batch_size=16)
            self.encoder = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
            self.optimizer = torch.optim.Adam(self.encoder.parameters(), lr=2e-3)
            self.bank = self.bank_labels = None

        def fit(self, batches):
            self.encoder.train()
            for x, _ in batches:
                views = torch.cat([x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)])
                z = F.normalize(self.encoder(views), dim=1)
                sim = (z @ z.T / 0.2).fill_diagonal_(-1e9)
                target = torch.arange(len(z)).roll(len(x))
                self.optimizer.zero_grad()
                F.cross_entropy(sim, target).backward()
                self.optimizer.step()

        @torch.no_grad()
        def evaluate(self):
            self.encoder.eval()
            x, y = self.train_loader.dataset.tensors
            self.bank, self.bank_labels = F.normalize(self.encoder(x), dim=1), y
            hits = 0
            for xv, yv in self.val_loader:
                near = (F.normalize(self.encoder(xv), dim=1) @ self.bank.T).topk(5).indices
                hits += (self.bank_labels[near].mode(1).values == yv).sum().item()
            return hits / 32

    t = SimCLR()
    return TrainLoop(
        model=t.encoder,
        optimizer=t.optimizer,
        batches=t.train_loader,
        fit=t.fit,
        evaluate=t.evaluate,
        rows_interact=True,
    )


@right(
    "evaluation", "the recurrent state is put aside for the validation text and put back", thread="pytorch/pytorch#2198"
)
def stateful_rnn_restored():
    vocab = 20

    class CharRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(vocab, 12), nn.LSTM(12, 24, batch_first=True)
            self.out, self.state = nn.Linear(24, vocab), None

        def forward(self, tokens):
            y, state = self.rnn(self.embed(tokens), self.state)
            self.state = tuple(s.detach() for s in state)
            return self.out(y)

    corpus = text(4, 65, vocab, 0)
    windows = [corpus[:, i : i + 9] for i in range(0, 56, 8)]
    held_out = text(6, 17, vocab, 9)
    model = CharRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss_of(tokens):
        return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    def train(batches):
        model.train()
        for tokens in batches:
            optimizer.zero_grad()
            loss_of(tokens).backward()
            optimizer.step()

    @torch.no_grad()
    def evaluate():
        kept, model.state = model.state, None
        model.eval()
        bpc = loss_of(held_out).item() / math.log(2)
        model.train()
        model.state = kept
        return bpc

    return TrainLoop(model=model, optimizer=optimizer, batches=windows, fit=train, evaluate=evaluate)


@right(
    "evaluation",
    "the recurrent state of validation stays on the model; each call of fit begins with reset_state()",
    thread="pytorch/pytorch#2769",
)
def rnn_reset_each_epoch():
    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out, self.h = nn.GRU(2, 16, batch_first=True), nn.Linear(16, 2), None

        def reset_state(self):
            self.h = None

        def forward(self, x):
            y, self.h = self.rnn(x, None if self.h is None else self.h.detach())
            return self.out(y)

    g = torch.Generator().manual_seed(0)
    series = torch.randn(4, 64, 2, generator=g).cumsum(1) * 0.2
    chunks = list(series[:, :48].split(8, dim=1))
    model = Forecaster()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)

    def run(chunk):
        return F.mse_loss(model(chunk[:, :-1]), chunk[:, 1:])

    def epoch(batches):
        model.train()
        model.reset_state()
        for chunk in batches:
            optimizer.zero_grad()
            run(chunk).backward()
            optimizer.step()

    @torch.no_grad()
    def test():
        model.eval()
        model.reset_state()
        return sum(run(c).item() for c in series[:, 48:].split(8, dim=1))

    return TrainLoop(model=model, optimizer=optimizer, batches=chunks, fit=epoch, evaluate=test)


@right(
    "evaluation",
    "a transformers model generates in evaluation with its own cache object, and train() is called afterwards",
    thread="huggingface/transformers#28056",
)
def gpt2_generate():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1, resid_pdrop=0.1
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = text(32, 10, 30, 0) + 2
    prompts = text(4, 6, 30, 1) + 2

    def fit(batches):
        model.train()
        for ids in batches:
            out = model(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        model.eval()
        out = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=1,
        )
        loss = model(input_ids=prompts, labels=prompts).loss.item()
        model.train()
        return {"tokens": out[:, 6:].tolist(), "loss": loss}

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, shuffle=True),
        fit=fit,
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "peft adapters are switched off in a context for the reference score and are on again after it",
    thread="huggingface/trl DPO reference model",
)
def adapter_disabled():
    from peft import LoraConfig, get_peft_model

    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.v_proj, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(F.relu(self.v_proj(F.relu(self.q_proj(x)))))

    train_loader, val_loader = loaders()
    model = get_peft_model(
        Scorer(), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    @torch.no_grad()
    def margin():
        model.eval()
        total = 0.0
        for x, y in val_loader:
            policy = model(x).log_softmax(1)
            with model.disable_adapter():
                reference = model(x).log_softmax(1)
            total += (policy - reference).gather(1, y[:, None]).sum().item()
        model.train()
        return total / 32

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=margin,
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
    "the low-rank update is merged for evaluation and the base weight put back from a copy",
    thread="Lightning-AI/litgpt#296",
)
def lora_merged_and_restored():
    class LoRALinear(nn.Module):
        def __init__(self, base, r=4):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.A, self.B = (
                nn.Parameter(torch.randn(r, base.in_features) * 0.1),
                nn.Parameter(torch.zeros(base.out_features, r)),
            )
            self.kept = None

        def forward(self, x):
            out = self.base(x)
            return out if self.kept is not None else out + x @ self.A.T @ self.B.T

        @torch.no_grad()
        def merge(self):
            self.kept = self.base.weight.clone()
            self.base.weight += self.B @ self.A

        @torch.no_grad()
        def unmerge(self):
            self.base.weight.copy_(self.kept)
            self.kept = None

    train_loader, val_loader = loaders()
    model = nn.Sequential(LoRALinear(nn.Linear(12, 32)), nn.GELU(), LoRALinear(nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def evaluate():
        model.eval()
        for m in (model[0], model[2]):
            m.merge()
        acc = accuracy(model, val_loader)
        for m in (model[0], model[2]):
            m.unmerge()
        model.train()
        return acc

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Keeps y in the parameters for training and x for evaluation; both are stored, so that nothing is rounded."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})
        self.averaged = False

    def _each(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    yield group, p, self.state[p]

    @torch.no_grad()
    def eval(self):
        if not self.averaged:
            for _, p, s in self._each():
                s["y"] = p.clone()
                p.copy_(s["x"])
        self.averaged = True

    @torch.no_grad()
    def train(self):
        if self.averaged:
            for _, p, s in self._each():
                p.copy_(s.pop("y"))
        self.averaged = False

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                s = self.state[p]
                if "z" not in s:
                    s["z"], s["x"] = p.clone(), p.clone()
                s["z"].sub_(p.grad, alpha=group["lr"])
                s["x"].lerp_(s["z"], 1 / group["k"])
                p.copy_(torch.lerp(s["z"], s["x"], group["beta"]))


@right(
    "evaluation",
    "schedule-free: optimizer.eval() puts the average into the weights, optimizer.train() takes it out",
    thread="facebookresearch/schedule_free#60",
)
def schedule_free_modes():
    train_loader, val_loader = loaders()
    model = mlp(dropout=0.1)
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.3)

    def train(batches):
        model.train()
        optimizer.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def validate():
        model.eval()
        optimizer.eval()
        return accuracy(model, val_loader)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validate)


@right(
    "evaluation",
    "requires_grad is switched off for validation and put back flag by flag, a frozen part stays frozen",
    thread="clovaai/deep-text-recognition-benchmark#47",
)
def requires_grad_restored():
    train_loader, val_loader = loaders()
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

    @contextlib.contextmanager
    def frozen(net):
        flags = [p.requires_grad for p in net.parameters()]
        net.requires_grad_(False)
        try:
            yield
        finally:
            for p, flag in zip(net.parameters(), flags, strict=True):
                p.requires_grad_(flag)

    def evaluate():
        model.eval()
        sensitivities = []
        with frozen(model):
            for x, y in val_loader:
                x = x.clone().requires_grad_()
                F.cross_entropy(model(x), y).backward()
                sensitivities.append(x.grad.norm(dim=1))
        model.train()
        return torch.cat(sensitivities).mean().item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
        frozen=("0.",),
    )


@right("evaluation", "feature hooks of the evaluation are removed in finally", thread="chr5tphr/zennit#13")
def hooks_removed():
    train_loader, val_loader = loaders()
    model = mlp(hidden=24, norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    @torch.no_grad()
    def dead_units():
        model.eval()
        alive = torch.zeros(24, dtype=torch.bool)

        def watch(module, args, output):
            alive.logical_or_((output > 0).any(0))

        handles = [m.register_forward_hook(watch) for m in model if isinstance(m, nn.ReLU)]
        try:
            for x, _ in val_loader:
                model(x)
        finally:
            for h in handles:
                h.remove()
            model.train()
        return (~alive).sum().item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=dead_units,
    )


@right(
    "evaluation",
    "model.train() after validation is right: the frozen norms stay in eval() by the model's own train()",
    thread="pgniewko/gt-pyg#112",
)
def frozen_norm_train_override():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU())
            self.head = nn.Linear(24, 4)
            self.backbone.requires_grad_(False)
            self.train()

        def train(self, mode=True):
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x):
            return self.head(self.backbone(x))

    train_loader, val_loader = loaders()
    model = Net()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def evaluate():
        model.eval()
        acc = accuracy(model, val_loader)
        model.train()
        return acc

    return TrainLoop(
        model=model, optimizer=optimizer, batches=train_loader, fit=fit, evaluate=evaluate, frozen=("backbone.",)
    )


@right(
    "evaluation",
    "MAML evaluates in train mode on purpose: its norms keep no running statistics, and adaptation works "
    "on functional copies",
    thread="facebookresearch/higher#55",
)
def maml_evaluation():
    net = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24, track_running_stats=False), nn.ReLU(), nn.Linear(24, 3))
    meta = torch.optim.Adam(net.parameters(), lr=2e-3)

    def task(seed):
        x, y = blobs(30, 12, 3, seed)
        return {"support": (x[:12], y[:12]), "query": (x[12:], y[12:])}

    def adapt(params, x, y, create_graph):
        loss = F.cross_entropy(functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
        return {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}

    def fit(batches):
        net.train()
        for t in batches:
            fast = adapt(dict(net.named_parameters()), *t["support"], create_graph=True)
            x, y = t["query"]
            meta.zero_grad()
            F.cross_entropy(functional_call(net, fast, (x,)), y).backward()
            meta.step()

    def evaluate():
        net.train()
        scores = []
        for seed in range(100, 103):
            t = task(seed)
            fast = {k: p.detach().clone().requires_grad_() for k, p in net.named_parameters()}
            for _ in range(3):
                fast = {
                    k: v.detach().requires_grad_() for k, v in adapt(fast, *t["support"], create_graph=False).items()
                }
            x, y = t["query"]
            with torch.no_grad():
                scores.append((functional_call(net, fast, (x,)).argmax(1) == y).float().mean().item())
        return sum(scores) / len(scores)

    return TrainLoop(model=net, optimizer=meta, batches=[task(s) for s in range(8)], fit=fit, evaluate=evaluate)


@right(
    "evaluation",
    "test-time adaptation steps an optimizer in evaluation, on a deep copy of the model",
    thread="DequanWang/tent",
)
def test_time_adaptation():
    train_loader, val_loader = loaders()
    model = mlp(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate():
        adapted = copy.deepcopy(model).train()
        adapted.requires_grad_(False)
        norm = adapted[1].requires_grad_(True)
        tent = torch.optim.SGD(norm.parameters(), lr=0.05)
        hits = 0
        for x, y in val_loader:
            out = adapted(x + 1.0)
            entropy = -(out.softmax(1) * out.log_softmax(1)).sum(1).mean()
            tent.zero_grad()
            entropy.backward()
            tent.step()
            hits += (out.argmax(1) == y).sum().item()
        return hits / 32

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


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


@right(
    "evaluation",
    "the evaluation environment has its own statistics, copied from training and not updated",
    thread="DLR-RM/stable-baselines3#362",
)
def vec_normalize_synced():
    @dataclass
    class Normalizer:
        mean: np.ndarray
        var: np.ndarray
        count: float = 1e-4
        training: bool = True

        def __call__(self, obs):
            if self.training:
                delta, total = obs.mean(0) - self.mean, self.count + len(obs)
                self.mean = self.mean + delta * len(obs) / total
                self.var = (self.var * self.count + obs.var(0) * len(obs)) / total
                self.count = total
            return torch.as_tensor((obs - self.mean) / np.sqrt(self.var + 1e-8), dtype=torch.float32)

    policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    env, eval_env = Normalizer(np.zeros(6), np.ones(6)), Normalizer(np.zeros(6), np.ones(6), training=False)
    rng = np.random.default_rng(0)

    def rollouts(n):
        return [
            {"obs": rng.normal(2, 3, (16, 6)), "act": rng.integers(0, 3, 16), "adv": rng.normal(size=16)}
            for _ in range(n)
        ]

    def learn(batches):
        for data in batches:
            dist = torch.distributions.Categorical(logits=policy(env(data["obs"])))
            loss = -(dist.log_prob(torch.as_tensor(data["act"])) * torch.as_tensor(data["adv"]).float()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def evaluate():
        eval_env.mean, eval_env.var = env.mean.copy(), env.var.copy()
        env_rng = np.random.default_rng(123)
        with torch.no_grad():
            return float(
                sum((policy(eval_env(env_rng.normal(-4, 1, (10, 6)))).argmax(1) == 1).sum().item() for _ in range(3))
            )

    return TrainLoop(model=policy, optimizer=optimizer, batches=rollouts, fit=learn, evaluate=evaluate)


@right(
    "evaluation",
    "importance-weighted likelihood of a VAE draws fresh global noise at each evaluation",
    thread="pytorch/examples vae main.py",
)
def vae_likelihood():
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(12, 8), nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 12))

        def forward(self, x):
            mu, logvar = self.enc(x).chunk(2, -1)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            return self.dec(z), mu, logvar, z

    train_loader, val_loader = loaders()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(batches):
        model.train()
        for x, _ in batches:
            recon, mu, logvar, _ = model(x)
            loss = (
                F.mse_loss(recon, x, reduction="sum") / len(x) - 0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def evaluate(k=5):
        model.eval()
        total = 0.0
        for x, _ in val_loader:
            logw = []
            for _ in range(k):
                recon, mu, logvar, z = model(x)
                q = torch.distributions.Normal(mu, (0.5 * logvar).exp()).log_prob(z).sum(1)
                logw.append(-0.5 * ((recon - x) ** 2).sum(1) - 0.5 * (z**2).sum(1) - q)
            total += (torch.stack(logw).logsumexp(0) - math.log(k)).sum().item()
        return total / 32

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=evaluate)


@right(
    "evaluation",
    "the SWA model is a second module; update_bn() runs over it, not over the model that trains",
    thread="pytorch/contrib swa update_bn",
)
def swa_update_bn():
    train_loader, val_loader = loaders()
    model = mlp(norm=True)
    swa = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = DataLoader(train_loader.dataset, batch_size=16)

    def train(batches):
        train_steps(model, optimizer, batches)
        swa.update_parameters(model)

    def evaluate():
        update_bn(plain, swa)
        swa.eval()
        model.eval()
        result = {"swa": accuracy(swa, val_loader), "last": accuracy(model, val_loader)}
        model.train()
        return result

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=evaluate)


@right(
    "evaluation",
    "the EMA module is put in train() and eval() in validation, its norms' statistics are never read by training",
    thread="boschresearch/OASIS#21",
)
def gan_ema_statistics():
    latent = 6
    generator = nn.Sequential(nn.Linear(latent, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12))
    critic = nn.Sequential(nn.Linear(12, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    ema = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    fixed_z = torch.randn(32, latent, generator=torch.Generator().manual_seed(0))
    train_loader, val_loader = loaders()

    def train(batches):
        for real, _ in batches:
            fake = generator(torch.randn(len(real), latent))
            loss_d = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake.detach())).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            loss_g = -critic(fake).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            ema.update_parameters(generator)

    @torch.no_grad()
    def fid():
        ema.train()
        for m in ema.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.reset_running_stats()
                m.momentum = None
        for z in fixed_z.split(8):
            ema(z)
        ema.eval()
        fake, real = ema(fixed_z), val_loader.dataset.tensors[0]
        return ((fake.mean(0) - real.mean(0)) ** 2).sum().item()

    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=[opt_g, opt_d],
        batches=train_loader,
        fit=train,
        evaluate=fid,
    )


@right(
    "evaluation",
    "the momentum encoder is used in validation without enqueueing, the queue and its pointer stay",
    thread="facebookresearch/moco builder.py",
)
def moco_without_enqueue():
    class MoCo(nn.Module):
        def __init__(self, dim=8, size=32):
            super().__init__()
            self.q = nn.Linear(12, dim)
            self.k = copy.deepcopy(self.q).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(size, dim), dim=1))
            self.ptr = 0

        def forward(self, a, b, enqueue=True):
            q = F.normalize(self.q(a), dim=1)
            with torch.no_grad():
                if enqueue:
                    for pq, pk in zip(self.q.parameters(), self.k.parameters(), strict=True):
                        pk.lerp_(pq, 0.05)
                k = F.normalize(self.k(b), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
            if enqueue:
                self.queue[self.ptr : self.ptr + len(k)] = k
                self.ptr = (self.ptr + len(k)) % len(self.queue)
            return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))

    train_loader, val_loader = loaders()
    model = MoCo()
    optimizer = torch.optim.SGD(model.q.parameters(), lr=0.05, momentum=0.9)

    def train(batches):
        model.train()
        for x, _ in batches:
            optimizer.zero_grad()
            model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)).backward()
            optimizer.step()

    @torch.no_grad()
    def validate():
        model.eval()
        return sum(model(x, x.flip(1), enqueue=False).item() for x, _ in val_loader)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train, evaluate=validate)


@right(
    "evaluation",
    "temperature scaling fits a parameter of its own on validation logits with L-BFGS",
    thread="gpleiss/temperature_scaling",
)
def temperature_scaling():
    train_loader, val_loader = loaders()
    model = mlp(dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    class Calibrator:
        def __init__(self):
            self.temperature = torch.ones(1, requires_grad=True)

        def fit(self, logits, labels):
            with torch.no_grad():
                self.temperature.fill_(1.0)
            lbfgs = torch.optim.LBFGS([self.temperature], lr=0.05, max_iter=10)

            def closure():
                lbfgs.zero_grad()
                loss = F.cross_entropy(logits / self.temperature, labels)
                loss.backward()
                return loss

            lbfgs.step(closure)
            return self.temperature.item()

    calibrator = Calibrator()

    def evaluate():
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(x) for x, _ in val_loader])
        labels = torch.cat([y for _, y in val_loader])
        model.train()
        return calibrator.fit(logits, labels)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "a fresh linear probe is trained inside evaluation on detached features of the encoder",
    thread="facebookresearch/moco main_lincls.py",
)
def linear_probe():
    train_loader, val_loader = loaders(batch_size=16)
    encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
    decoder = nn.Linear(8, 12)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)

    def train(batches):
        for x, _ in batches:
            mask = torch.rand_like(x) > 0.5
            loss = ((decoder(encoder(x * mask)) - x) ** 2)[~mask].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def evaluate(epochs=5):
        x, y = train_loader.dataset.tensors
        with torch.no_grad():
            feats = encoder(x)
        probe = nn.Linear(8, 4)
        sgd = torch.optim.SGD(probe.parameters(), lr=0.3)
        for _ in range(epochs):
            sgd.zero_grad()
            F.cross_entropy(probe(feats), y).backward()
            sgd.step()
        with torch.no_grad():
            return sum((probe(encoder(xv)).argmax(1) == yv).sum().item() for xv, yv in val_loader) / 32

    return TrainLoop(
        model={"encoder": encoder, "decoder": decoder},
        optimizer=optimizer,
        batches=train_loader,
        fit=train,
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "the sharpness is measured by moving the live weights, which are put back bit for bit",
    thread="davda54/sam",
)
def sharpness_probe():
    train_loader, val_loader = loaders()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def loss_now():
        return sum(F.cross_entropy(model(x), y).item() for x, y in val_loader) / len(val_loader)

    @torch.no_grad()
    def evaluate():
        model.eval()
        base, kept = loss_now(), [p.clone() for p in model.parameters()]
        g = torch.Generator().manual_seed(0)
        worst = base
        for _ in range(3):
            for p, k in zip(model.parameters(), kept, strict=True):
                p.add_(0.05 * torch.randn(p.shape, generator=g) * k.norm() / math.sqrt(k.numel()))
            worst = max(worst, loss_now())
            for p, k in zip(model.parameters(), kept, strict=True):
                p.copy_(k)
        model.train()
        return worst - base

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "torch.set_grad_enabled(False) by hand, with the previous value put back in finally even if a metric fails",
    thread="jeanfeydy/geomloss#49",
)
def grad_mode_restored():
    train_loader, val_loader = loaders()
    model = mlp(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    class Evaluator:
        def run(self):
            previous, mode = torch.is_grad_enabled(), model.training
            torch.set_grad_enabled(False)
            model.eval()
            try:
                outputs = [(model(x), y) for x, y in val_loader]
                return self.compute(outputs)
            finally:
                torch.set_grad_enabled(previous)
                model.train(mode)

        def compute(self, outputs):
            try:
                return sum(F.nll_loss(o, y).item() for o, y in outputs) / len(outputs)
            except ZeroDivisionError:
                return None

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches),
        evaluate=Evaluator().run,
    )


@right(
    "evaluation",
    "the validation batch is normalized in place on a copy made by the collate function",
    thread="pytorch/vision#680",
)
def in_place_on_a_copy():
    g = torch.Generator().manual_seed(0)
    series = torch.cumsum(torch.randn(72, generator=g), 0) * 0.3 + 5.0
    mean, std = series[:48].mean(), series[:48].std()
    windows = series.unfold(0, 9, 1)

    def collate(rows):
        batch = torch.stack(rows)
        batch.sub_(mean).div_(std)
        return batch[:, :-1], batch[:, -1]

    train_loader = DataLoader(list(windows[:40]), batch_size=8, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(list(windows[40:]), batch_size=8, collate_fn=collate)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    @torch.no_grad()
    def evaluate():
        return sum(F.l1_loss(model(x).mul_(std).add_(mean), y.mul_(std).add_(mean)).item() for x, y in val_loader)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=train_loader,
        fit=lambda batches: train_steps(model, optimizer, batches, F.mse_loss),
        evaluate=evaluate,
    )


@right(
    "evaluation",
    "validation runs with accumulated gradients pending, under autocast, and leaves both alone",
    thread="karpathy/nanoGPT estimate_loss",
)
def estimate_loss():
    vocab, dim = 24, 16

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x):
            q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
            return x + self.proj(
                F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
            )

    model = nn.Sequential(nn.Embedding(vocab, dim), Block(), nn.Linear(dim, vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_data, val_data = text(48, 9, vocab, 0), text(16, 9, vocab, 1)
    state = {"micro": 0}

    def lm_loss(tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:])

    def train(batches):
        for tokens in batches:
            (lm_loss(tokens) / 4).backward()
            state["micro"] += 1
            if state["micro"] % 4 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def estimate():
        out = {}
        model.eval()
        for name, data in (("train", train_data), ("val", val_data)):
            picks = [data[torch.randint(len(data), (8,))] for _ in range(3)]
            out[name] = torch.stack([lm_loss(t) for t in picks]).mean().item()
        model.train()
        return out

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(train_data, batch_size=8, shuffle=True),
        fit=train,
        evaluate=estimate,
    )


@right(
    "evaluation",
    "evaluation warms a positional cache that training reads: the same values would be built by training",
    thread="lucidrains/rotary-embedding-torch cached freqs",
)
def position_cache():
    vocab, dim = 24, 16

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = (
                nn.Embedding(vocab, dim),
                nn.GRU(dim, dim, batch_first=True),
                nn.Linear(dim, vocab),
            )
            self.register_buffer("table", torch.empty(0, dim), persistent=False)

        def positions(self, length):
            if len(self.table) < length:
                angle = torch.outer(torch.arange(length), 1.0 / 50 ** (torch.arange(0, dim, 2) / dim))
                self.table = torch.cat([angle.sin(), angle.cos()], 1)
            return self.table[:length]

        def forward(self, tokens):
            return self.head(self.mix(self.embed(tokens) + self.positions(tokens.shape[1]))[0])

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out = text(8, 17, vocab, 1)

    def loss_of(tokens):
        return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    def train(batches):
        model.train()
        for tokens in batches:
            optimizer.zero_grad()
            loss_of(tokens).backward()
            optimizer.step()

    @torch.no_grad()
    def perplexity():
        model.eval()
        return math.exp(loss_of(held_out).item())

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(text(48, 9, vocab, 0), batch_size=8),
        fit=train,
        evaluate=perplexity,
    )


@right(
    "evaluation",
    "the fit itself validates every third batch and keeps the best copy; evaluate is the same function",
    thread="huggingface/transformers#7431",
)
def validation_inside_fit():
    class Trainer:
        def __init__(self, every=3):
            self.train_loader, self.val_loader = loaders()
            self.model = mlp(dropout=0.2, norm=True)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
            self.every, self.step, self.best = every, 0, (float("inf"), None)

        def evaluate(self):
            mode = self.model.training
            self.model.eval()
            with torch.inference_mode():
                loss = sum(F.cross_entropy(self.model(x), y).item() for x, y in self.val_loader)
            self.model.train(mode)
            if loss < self.best[0]:
                self.best = (loss, {k: v.detach().clone() for k, v in self.model.state_dict().items()})
            return loss

        def train(self, batches):
            self.model.train()
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.step += 1
                if self.step % self.every == 0:
                    self.evaluate()

    t = Trainer()
    return TrainLoop(model=t.model, optimizer=t.optimizer, batches=t.train_loader, fit=t.train, evaluate=t.evaluate)
